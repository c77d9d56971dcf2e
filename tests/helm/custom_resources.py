"""Schemas of the objects that are no part of Kubernetes: the fields that the chart sets, and no others."""

from __future__ import annotations

from typing import Any

import jsonschema

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
SELECTOR: Schema = {"type": "object", "required": ["matchLabels"], "properties": {"matchLabels": LABELS}}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object with these keys alone."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "additionalProperties": False, "required": [*required], "properties": properties}


def some(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


TRIGGER = record({"type": {"const": "prometheus"}, "name": TEXT, "metadata": LABELS})
ALERT = record(
    {"alert": TEXT, "expr": TEXT, "labels": LABELS, "annotations": LABELS},
    {"for": {"type": "string", "pattern": "^[0-9]+(s|m|h)$"}},
)
TEMPLATE = record({"metadata": {"type": "object"}, "spec": {"type": "object", "required": ["containers"]}})
RESTARTS: Schema = {"enum": ["RecreateGroupOnPodRestart", "None"]}
BACKEND = record({"name": TEXT}, {"group": TEXT, "kind": TEXT, "port": COUNT})
SPECS: dict[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): record(
        {"endpoints": some(record({"port": TEXT, "interval": TEXT})), "selector": SELECTOR}
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): record(
        {"groups": some(record({"name": TEXT, "rules": some(ALERT)}))}
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): record(
        {
            "scaleTargetRef": record({"name": TEXT}),
            "minReplicaCount": COUNT,
            "maxReplicaCount": COUNT,
            "pollingInterval": COUNT,
            "cooldownPeriod": COUNT,
            "advanced": record({"horizontalPodAutoscalerConfig": record({"behavior": {"type": "object"}})}),
            "triggers": some(TRIGGER),
        }
    ),
    ("gateway.networking.k8s.io/v1", "GRPCRoute"): record(
        {
            "parentRefs": some({"type": "object", "required": ["name"]}),
            "rules": some(record({"matches": some({"type": "object"}), "backendRefs": some(BACKEND)})),
        },
        {"hostnames": some(TEXT)},
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): record(
        {
            "targetPorts": some(record({"number": COUNT})),
            "selector": SELECTOR,
            "endpointPickerRef": record({"name": TEXT, "port": record({"number": COUNT})}),
        }
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): record(
        {
            "replicas": COUNT,
            "rolloutStrategy": {"type": "object", "required": ["type"]},
            "leaderWorkerTemplate": record(
                {"size": COUNT, "restartPolicy": RESTARTS, "workerTemplate": TEMPLATE}, {"leaderTemplate": TEMPLATE}
            ),
        }
    ),
}


def check(one: dict[str, Any]) -> bool:
    """Whether it is such an object. Raises jsonschema.ValidationError where it is one that is not valid."""
    spec = SPECS.get((one["apiVersion"], one["kind"]))
    if spec is None:
        return False
    jsonschema.validate(one["spec"], spec)
    return True
