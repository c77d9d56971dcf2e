"""Generates from the chart's values.yaml its schema, and the table of its README.

    python scripts/chart.py [--check]    # `make chart`

A value's type is that of its default, unless RULES says more. Objects have no other keys than their defaults.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[1] / "helm" / "whippet"
BEGIN, END = "<!-- values -->", "<!-- end of values -->"
Schema = dict[str, Any]

COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
MORE_THAN_0: Schema = {"type": "number", "exclusiveMinimum": 0}
SECONDS_OR_COMPUTED: Schema = {"type": ["integer", "null"], "minimum": 0}
BOOLEAN_OR_COMPUTED: Schema = {"type": ["boolean", "null"]}
WORDS: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
OBJECT: Schema = {"type": "object"}
OBJECTS: Schema = {"type": "array", "items": OBJECT}
QUANTITY: Schema = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?([KMGTP]i?|k)?$"}
NAME: Schema = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"}
PULL: Schema = {"enum": ["Always", "IfNotPresent", "Never"]}
MODES = ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]

RULES: dict[str, Schema] = {
    "nameOverride": NAME,
    "fullnameOverride": NAME,
    "commonLabels": LABELS,
    "commonAnnotations": LABELS,
    "image.repository": {"type": "string", "minLength": 1},
    "image.tag": {"type": "string", "not": {"const": "latest"}},
    "image.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image.pullPolicy": PULL,
    "image.pullSecrets": WORDS,
    "model.source": {"enum": ["demo", "pvc", "initContainer", "image"]},
    "model.path": {"type": "string", "not": {"pattern": "^/|(^|/)\\.\\.(/|$)"}},
    "model.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "model.sizeGiB": MORE_THAN_0,
    "model.readMiBPerSecond": MORE_THAN_0,
    "model.manifest": {"type": "string", "pattern": "^([0-9a-f]{64}  [^\\n]+\\n?)*$"},
    "model.pvc.existingClaim": NAME,
    "model.pvc.size": QUANTITY,
    "model.pvc.storageClass": NAME,
    "model.pvc.accessModes": {"type": "array", "minItems": 1, "items": {"enum": MODES}},
    "model.initContainer.command": WORDS,
    "model.initContainer.env": OBJECTS,
    "model.initContainer.sizeLimit": QUANTITY,
    "model.image.pullPolicy": PULL,
    "replicaCount": COUNT,
    "config": OBJECT,
    "tensorParallel": {"type": "integer", "minimum": 1, "maximum": 64},
    "semanticMode": {"enum": ["off", "shadow", "on"]},
    "logLevel": {"enum": ["debug", "info", "warning", "error"]},
    "logFormat": {"enum": ["text", "json"]},
    "extraEnvVars": OBJECTS,
    "drain.delaySeconds": {"type": "number", "minimum": 0, "maximum": 3600},
    "drain.timeoutSeconds": SECONDS_OR_COMPUTED,
    "drain.maxTokens": POSITIVE,
    "drain.tokensPerSecond": MORE_THAN_0,
    "terminationGracePeriodSeconds": SECONDS_OR_COMPUTED,
    "startup.baseSeconds": POSITIVE,
    "startup.budgetSeconds": SECONDS_OR_COMPUTED,
    "progressDeadlineSeconds": SECONDS_OR_COMPUTED,
    "minReadySeconds": COUNT,
    "strategy.type": {"enum": ["RollingUpdate", "Recreate"]},
    "auth.insecure": BOOLEAN_OR_COMPUTED,
    "auth.tokens.existingSecret": NAME,
    "auth.tenants.existingSecret": NAME,
    "tls.existingSecret": NAME,
    "redis.mode": {"enum": ["disabled", "external", "bundled"]},
    "redis.url": {"type": "string", "pattern": "^(rediss?://([^:@/]+@)?[^@/]+(/[0-9]*)?)?$"},
    "redis.port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "redis.existingSecret": NAME,
    "redis.files": {"type": "array", "items": {"enum": ["ca.crt", "tls.crt", "tls.key"]}},
    "redis.keySecret": NAME,
    "redis.bundled.maxmemoryMiB": POSITIVE,
    "redis.bundled.resources": OBJECT,
    "gpu.count": {"type": "integer", "minimum": 0, "maximum": 64},
    "resources": OBJECT,
    "cacheDir.sizeLimit": QUANTITY,
    "nodeSelector": LABELS,
    "tolerations": OBJECTS,
    "affinity": OBJECT,
    "topologySpreadConstraints": {"type": ["array", "null"], "items": OBJECT},
    "podLabels": LABELS,
    "podAnnotations": LABELS,
    "podSecurityContext": OBJECT,
    "containerSecurityContext": OBJECT,
    "serviceAccount.name": NAME,
    "serviceAccount.annotations": LABELS,
    "pdb.enabled": BOOLEAN_OR_COMPUTED,
    "pdb.maxUnavailable": {"anyOf": [POSITIVE, {"type": "string", "pattern": "^[0-9]+%$"}]},
    "leaderWorkerSet.size": {"type": "integer", "minimum": 1, "maximum": 16},
    "leaderWorkerSet.secretName": NAME,
    "service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "service.annotations": LABELS,
    "networkPolicy.clients": OBJECTS,
    "networkPolicy.operators": OBJECTS,
    "networkPolicy.monitoring": OBJECTS,
    "networkPolicy.extraEgress": OBJECTS,
    "grpcRoute.parentRefs": OBJECTS,
    "grpcRoute.hostnames": WORDS,
    "metrics.serviceMonitor.interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
    "metrics.serviceMonitor.labels": LABELS,
    "metrics.prometheusRule.labels": LABELS,
    "metrics.dashboard.labels": LABELS,
    "traces.endpoint": {"type": "string", "pattern": "^(https?://[^/:]+(:[0-9]+)?/?)?$"},
    "traces.peers": OBJECTS,
    "autoscaling.minReplicas": COUNT,
    "autoscaling.maxReplicas": POSITIVE,
    "autoscaling.waitingPerReplica": POSITIVE,
    "autoscaling.kvUsePercent": {"type": "integer", "minimum": 1, "maximum": 100},
    "smoke.tokenSecret": NAME,
    "smoke.clientSecret": NAME,
    "smoke.serverName": NAME,
    "smoke.admin": BOOLEAN_OR_COMPUTED,
    "smoke.timeoutSeconds": POSITIVE,
}


def leaves(values: Any, path: str = "") -> dict[str, Any]:
    """Maps paths to defaults of everything that a user sets as one value."""
    if path not in RULES and isinstance(values, dict):
        return {
            leaf: value
            for key, one in values.items()
            for leaf, value in leaves(one, f"{path}.{key}".lstrip(".")).items()
        }
    return {path: values}


def shape(value: Any, path: str = "") -> Schema:
    if path in RULES:
        return RULES[path]
    if isinstance(value, dict):
        parts = {key: shape(one, f"{path}.{key}".lstrip(".")) for key, one in value.items()}
        return {"type": "object", "additionalProperties": False, "properties": parts}
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, str):
        return {"type": "string"}
    raise SystemExit(f"{path}: add a rule to RULES")


def schema(values: dict[str, Any]) -> str:
    values_shape = shape(values)
    values_shape["properties"]["global"] = {"type": "object", "description": "of parent charts; not used"}
    title = "Values of the chart whippet"
    whole = {"$schema": "http://json-schema.org/draft-07/schema#", "title": title, **values_shape}
    return json.dumps(whole, indent=2) + "\n"


def table(text: str, values: dict[str, Any]) -> str:
    """Returns the README's part, in the order of values.yaml. Every leaf has its comment, and every comment its
    leaf."""
    defaults, lines, seen = leaves(values), [], set()
    for kind, name, words in re.findall(r"^ *## @(section|param) (\S+) ?(.*)$", text, re.MULTILINE):
        if kind == "section":
            lines += ["", f"### {name} {words}".rstrip(), "", "| value | default | what |", "| --- | --- | --- |"]
            continue
        seen.add(name)
        default = json.dumps(defaults.get(name)).replace("|", "\\|")
        lines.append(f"| `{name}` | `{default}` | {words} |")
    if seen != defaults.keys():
        raise SystemExit(f"values.yaml: without a comment or without a value: {sorted(seen ^ defaults.keys())}")
    return "\n".join(lines).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 where something would change")
    check = parser.parse_args().check
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    if unknown := RULES.keys() - leaves(values).keys():
        raise SystemExit(f"rules without a value: {sorted(unknown)}")
    readme = (CHART / "README.md").read_text()
    head, _, rest = readme.partition(BEGIN)
    made = {
        "values.schema.json": schema(values),
        "README.md": f"{head}{BEGIN}\n{table(text, values)}\n{END}{rest.partition(END)[2]}",
    }
    stale = [
        name for name, content in made.items() if not (CHART / name).exists() or (CHART / name).read_text() != content
    ]
    if not check:
        for name in stale:
            (CHART / name).write_text(made[name])
    elif stale:
        sys.stderr.write(f"{', '.join(stale)} do not follow from values.yaml: call make chart\n")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
