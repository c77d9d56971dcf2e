"""What the chart makes of values: valid objects in every documented combination, or a line that says what to do."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from service.config.sources import load
from tests.helm.conftest import CHART, Object
from tests.helm.custom_resources import check
from tests.redis_guarded import rules

pytestmark = pytest.mark.proof

Render = Callable[..., list[Object]]
VERSIONS = ("1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
TOKENS = "auth.tokens.existingSecret=tokens"
ALL_SIGHT = (
    "metrics.serviceMonitor.enabled=true",
    "metrics.prometheusRule.enabled=true",
    "metrics.dashboard.enabled=true",
    "traces.endpoint=http://collector:4317",
)
GROUP = (
    "leaderWorkerSet.enabled=true",
    "leaderWorkerSet.size=2",
    "leaderWorkerSet.secretName=ranks",
    "tensorParallel=4",
    "gpu.count=2",
)
COMBINATIONS: dict[str, tuple[str, ...]] = {
    "no values": (),
    "a GPU and a claim": ("gpu.count=1", "runtimeClassName=nvidia", "model.source=pvc", "model.path=", TOKENS),
    "a slice of a GPU": ("gpu.count=1", "gpu.resourceName=nvidia.com/mig-3g.40gb", "model.source=pvc", TOKENS),
    "a claim that is made": ("model.source=pvc", "model.pvc.storageClass=fast", TOKENS),
    "a model fetched": ("model.source=initContainer", "model.initContainer.image=fetch@sha256:0", TOKENS),
    "a checked model": (f"model.manifest={'0' * 64}  config.json", f"model.digest=sha256:{'0' * 64}"),
    "TLS and tenants": ("tls.existingSecret=tls", "tls.clientCA=true", "auth.tenants.existingSecret=quotas"),
    "an external Redis": (
        "redis.mode=external",
        "redis.url=rediss://whippet@master/0",
        "redis.sentinels=a:26379\\,b:26380",
        "redis.existingSecret=redis",
        "redis.files={ca.crt,tls.crt,tls.key}",
        "redis.keySecret=keys",
    ),
    "Redis of the chart": ("redis.mode=bundled", "replicaCount=3"),
    "everything to be seen": ALL_SIGHT,
    "KEDA": ("autoscaling.keda.enabled=true", "autoscaling.keda.prometheus=http://prometheus:9090"),
    "HPA": ("autoscaling.hpa.enabled=true",),
    "a route": ("grpcRoute.enabled=true", "grpcRoute.parentRefs[0].name=gateway", "grpcRoute.hostnames={a.example}"),
    "a pool": (
        "grpcRoute.enabled=true",
        "grpcRoute.parentRefs[0].name=gateway",
        "inferencePool.enabled=true",
        "inferencePool.endpointPicker=picker",
    ),
    "groups": ("leaderWorkerSet.enabled=true",),
    "groups of two pods": (*GROUP, "replicaCount=2"),
    "no GPU to spare": ("strategy.type=Recreate", "pdb.enabled=false"),
    "no policy": ("networkPolicy.enabled=false",),
}
IMAGE = ("model.source=image", "model.image.reference=models/qwen@sha256:0", "model.path=", TOKENS)

REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "an unknown value": (("replicas=2",), "Additional property replicas is not allowed"),
    "an unknown inner value": (("drain.seconds=2",), "drain: Additional property seconds is not allowed"),
    "a floating tag": (("image.tag=latest",), "image.tag: Must not validate"),
    "half a digest": (("image.digest=sha256:abc",), "image.digest: Does not match pattern"),
    "two GPUs": (("gpu.count=2",), "gpu.count: a server takes as many GPUs as tensorParallel says"),
    "a path out of the volume": (("model.path=../etc",), "model.path: Must not validate"),
    "a password in the URL": (("redis.url=redis://a:b@c/0",), "redis.url: Does not match pattern"),
    "too little grace": (("terminationGracePeriodSeconds=30",), "terminationGracePeriodSeconds: 30 s are less than"),
    "too little to start": (
        ("startup.budgetSeconds=30", "model.sizeGiB=40"),
        "startup.budgetSeconds: 30 s are too few",
    ),
    "a deadline before the budget": (("progressDeadlineSeconds=10",), "progressDeadlineSeconds: must be more than"),
    "two scalers": (
        ("autoscaling.keda.enabled=true", "autoscaling.hpa.enabled=true"),
        "autoscaling: keda and hpa exclude each other",
    ),
    "KEDA without Prometheus": (("autoscaling.keda.enabled=true",), "autoscaling.keda.prometheus: name the address"),
    "more at least than at most": (("autoscaling.minReplicas=9",), "autoscaling.minReplicas: must be at most"),
    "no server at all": (("autoscaling.minReplicas=0",), "autoscaling.minReplicas: with no server nobody counts"),
    "groups that scale": (("leaderWorkerSet.enabled=true", "autoscaling.hpa.enabled=true"), "leaderWorkerSet.enabled:"),
    "a group without its kind": (GROUP[1:], "leaderWorkerSet.size: a group of several pods needs"),
    "a group without a secret": (
        (*GROUP, "leaderWorkerSet.secretName="),
        "leaderWorkerSet.secretName: name a Secret with the key `secret`",
    ),
    "a group that is too large": ((*GROUP, "leaderWorkerSet.size=17"), "leaderWorkerSet.size: Must be less than or"),
    "more pods than ranks": ((*GROUP, "tensorParallel=1"), "tensorParallel: counts the ranks of all pods of a group"),
    "ranks that pods cannot share": (
        (*GROUP, "leaderWorkerSet.size=3"),
        "set it to a multiple of leaderWorkerSet.size, which is 3",
    ),
    "a group's GPUs in each of its pods": ((*GROUP, "gpu.count=4"), "gpu.count: each pod of a group takes"),
    "too few GPUs in a group": ((*GROUP, "gpu.count=1"), "GPUs; set it to 2"),
    "slices in a group": (
        (*GROUP, "tensorParallel=2", "gpu.count=1", "gpu.resourceName=nvidia.com/mig-3g.40gb"),
        "leaderWorkerSet.size: one slice of a GPU makes one server",
    ),
    "a setting of the chart's in a group": (
        (*GROUP, "config.engine.ranks-listen=x"),
        "config.engine.ranks-listen: the chart sets it itself",
    ),
    "an authority without a certificate": (("tls.clientCA=true",), "tls.clientCA: needs tls.existingSecret"),
    "strangers": (("model.source=pvc",), "auth: name auth.tokens.existingSecret"),
    "no slice": (("gpu.resourceName=nvidia.com/mig-1g.5gb",), "gpu.count: one slice of a GPU makes one server"),
    "no URL": (("redis.mode=external",), "redis.url: the external Redis needs one"),
    "files of no Secret": (("redis.files={ca.crt}",), "redis.files: needs redis.existingSecret"),
    "nothing that fetches": (("model.source=initContainer", TOKENS), "model.initContainer.image: name the image"),
    "no image with a model": (("model.source=image", TOKENS), "model.image.reference: name the OCI image"),
    "a route from nowhere": (("grpcRoute.enabled=true",), "grpcRoute.parentRefs: name a Gateway"),
    "a pool without a picker": (("inferencePool.enabled=true",), "inferencePool.endpointPicker: name the Service"),
    "a setting of the chart's": (("config.listen=x",), "config.listen: the chart sets it itself"),
    "a setting of the chart's within": (("config.drain.delay=3",), "config.drain.delay: the chart sets it itself"),
    "a switch among the settings": (("config.optimizations.graphs=false",), "config.optimizations: the chart sets it"),
    "a model split over GPUs": (
        ("tensorParallel=2", "gpu.count=1"),
        "tensorParallel: each process has a GPU of its own",
    ),
    "one server that may not go": (("pdb.enabled=true", "strategy.type=Recreate"), "pdb.enabled: one server"),
}


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [one for one in objects if one["kind"] == kind]


def only(objects: list[Object], kind: str, name: str = "") -> Object:
    (found,) = (one for one in of_kind(objects, kind) if name in ("", one["metadata"]["name"]))
    return found


@pytest.fixture(scope="module")
def valid() -> set[str]:
    """Objects that were looked at already: most are the same in every combination."""
    return set()


@pytest.mark.parametrize("name", COMBINATIONS)
def test_objects_are_valid(name: str, render: Render, valid: set[str]) -> None:
    for one in (rendered := render(*COMBINATIONS[name])):
        assert one["metadata"]["namespace"] == "models"
        if (text := json.dumps(one)) in valid or check(one):
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(one, version, strict=True)
        valid.add(text)
    assert len({(one["kind"], one["metadata"]["name"]) for one in rendered}) == len(rendered)


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_an_image_as_a_volume(version: str, render: Render) -> None:
    for one in render(*IMAGE, kube=f"{version}.0"):
        kubernetes_validate.validate(one, version, strict=True)


def test_an_image_as_a_volume_needs_a_cluster_that_has_them(helm: Any) -> None:
    words = [word for one in IMAGE for word in ("--set", one)]
    done = helm("template", "one", str(CHART), "--kube-version", "1.30.0", *words)
    assert "model.source: image volumes need Kubernetes 1.31" in done.stderr


def test_lint(helm: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", REFUSED)
def test_contradictions_are_refused_by_name(name: str, helm: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    sets, line = REFUSED[name]
    words = [word for one in sets for word in ("--set", one)]
    done = helm("template", "one", str(CHART), "--kube-version", "1.32.0", *words)
    assert done.returncode == 1
    assert line in done.stderr


def pods(objects: list[Object]) -> list[Object]:
    """Specs of all of them."""
    found = [one["spec"] for one in of_kind(objects, "Pod")]
    for kind in ("Deployment", "StatefulSet"):
        found += [one["spec"]["template"]["spec"] for one in of_kind(objects, kind)]
    return found


def test_pods_follow_the_restricted_profile(render: Render) -> None:
    values = (f"model.manifest={'0' * 64}  config.json", "redis.mode=bundled")
    fetched = ("model.source=initContainer", "model.initContainer.image=fetch@sha256:0")
    specs = pods(render(*values, *fetched, TOKENS))
    assert len(specs) == 3
    for pod in specs:
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] >= 10_000
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            held = container["securityContext"]
            assert held["readOnlyRootFilesystem"] is True
            assert held["allowPrivilegeEscalation"] is False
            assert held["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


def settings_of(objects: list[Object], folder: Path) -> list[str]:
    """Flags that give a server what the pod's two files give it, with the paths of this machine."""
    for kind in ("config", "switches"):
        held = only(objects, "ConfigMap", f"one-whippet-{kind}")["data"][f"{kind}.yaml"]
        (folder / f"{kind}.yaml").write_text(held)
    return [f"--config={folder}"]


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_server_takes_the_settings(name: str, render: Render, tmp_path: Path) -> None:
    """Every key of both files is a setting, and no file is looked for yet."""
    settings = load(settings_of(render(*COMBINATIONS[name]), tmp_path))
    assert settings.listen == "0.0.0.0:50051"
    assert settings.drain.timeout == 103


def test_a_model_is_split_over_processes(render: Render, tmp_path: Path) -> None:
    assert load(settings_of(render("tensorParallel=2"), tmp_path)).tensor_parallel == 2


def test_each_switch_is_a_value(render: Render, tmp_path: Path) -> None:
    names = yaml.safe_load((CHART / "values.yaml").read_text())["optimizations"]
    off = [f"optimizations.{name}.enabled=false" for name in names]
    options = asdict(load(settings_of(render(*off), tmp_path)).optimizations)
    assert options == dict.fromkeys(options, False)


def test_budgets_follow_from_the_model(render: Render) -> None:
    """40 GiB at 100 MiB/s are read in 410 s; twice that and a minute. 8,192 tokens at 40 a second take 205 s."""
    objects = render("model.sizeGiB=40", "drain.maxTokens=8192")
    deployment = only(objects, "Deployment")["spec"]
    pod = deployment["template"]["spec"]
    probe = pod["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 880
    assert deployment["progressDeadlineSeconds"] == 1000
    assert pod["terminationGracePeriodSeconds"] == 10 + 205 + 10


def test_only_named_peers_get_in(render: Render) -> None:
    policy = only(render(), "NetworkPolicy", "one-whippet")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    by_port = {rule["ports"][0]["port"]: rule.get("from") for rule in policy["ingress"]}
    assert by_port.keys() == {50051, 50052, 50053, 9090}
    assert by_port[50053] is None
    assert all(by_port[port] for port in (50051, 50052, 9090))
    assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == [53, 53]


def test_redis_lets_our_user_do_what_the_documentation_says() -> None:
    assert (CHART / "files" / "redis-rules.txt").read_text().split() == rules().split()
