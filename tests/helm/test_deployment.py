"""What docs/deployment.md tells to set, rendered by a real Helm, and what it says of the objects."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from tests.helm.conftest import CHART, ROOT, Object

pytestmark = pytest.mark.proof

Helm = Callable[..., CompletedProcess[str]]
PAGE = (ROOT / "docs" / "deployment.md").read_text()
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
BLOCKS = [(title, text) for title in SECTIONS for text in re.findall(r"```yaml\n(.*?)```", SECTIONS[title], re.DOTALL)]
BASE = BLOCKS[0][1]


@pytest.fixture
def rendered(helm: Helm, tmp_path: Path) -> Callable[..., dict[str, list[Object]]]:
    """Values, and further ones as `--set` takes them → objects by their kind."""

    def call(values: str, *sets: str) -> dict[str, list[Object]]:
        (tmp_path / "base.yaml").write_text(BASE)
        (tmp_path / "more.yaml").write_text(values)
        words = [f"--values={tmp_path}/{name}.yaml" for name in ("base", "more")]
        words += [word for one in sets for word in ("--set", one)]
        done = helm("template", "whippet", str(CHART), "--namespace=models", "--kube-version=1.32.0", *words)
        assert done.returncode == 0, done.stderr
        found: dict[str, list[Object]] = {}
        for one in yaml.safe_load_all(done.stdout):
            if one:
                found.setdefault(one["kind"], []).append(one)
        return found

    return call


Rendered = Callable[..., dict[str, list[Object]]]


def block(title: str) -> str:
    (text,) = (text for name, text in BLOCKS if name == title)
    return text


def pod(objects: dict[str, list[Object]]) -> Any:
    (workload,) = objects["Deployment"]
    return workload["spec"]["template"]["spec"]


def routed(objects: dict[str, list[Object]]) -> set[str]:
    """Services that a Gateway is told of."""
    (route,) = objects["GRPCRoute"]
    return {match["method"]["service"] for rule in route["spec"]["rules"] for match in rule["matches"]}


@pytest.mark.parametrize(("title", "values"), BLOCKS, ids=[title for title, _ in BLOCKS])
def test_helm_takes_each_block(title: str, values: str, rendered: Rendered) -> None:
    assert rendered(values)


def test_a_gateway_finds_the_services_and_is_let_in(rendered: Rendered) -> None:
    objects = rendered(block("Behind a proxy"))
    own = set(re.findall(r"`(whippet\.v1\.\w+Service)`", SECTIONS["Behind a proxy"]))
    assert routed(objects) == own | {"inference.GRPCInferenceService", "vllm.grpc.engine.VllmEngine"}
    silent = ("config.protocols.open-inference=false", "config.protocols.vllm-engine=false")
    assert routed(rendered(block("Behind a proxy"), *silent)) == own
    policy = next(one for one in objects["NetworkPolicy"] if one["metadata"]["name"] == "whippet")
    assert "gateways" in str(policy["spec"]["ingress"][0])
    (service,) = (one for one in objects["Service"] if one["metadata"]["name"] == "whippet")
    assert service["spec"]["ports"][0]["appProtocol"] == "kubernetes.io/h2c"


def test_certificates_are_mounted_so_that_new_ones_reach_the_server(rendered: Rendered) -> None:
    objects = rendered(block("mTLS and its rotation"))
    (mount,) = (one for one in pod(objects)["containers"][0]["volumeMounts"] if one["name"] == "tls")
    assert "subPath" not in mount
    assert not any("appProtocol" in port for one in objects["Service"] for port in one["spec"]["ports"])
    assert pod(objects)["containers"][0]["readinessProbe"]["grpc"]["port"] == 50053


def test_what_scales_and_what_does_not(rendered: Rendered) -> None:
    (scaled,) = rendered(block("Autoscaling"))["ScaledObject"]
    waiting, pages, loading = (one["metadata"] for one in scaled["spec"]["triggers"])
    assert (waiting["threshold"], pages["threshold"], loading["threshold"]) == ("8", "85", "1000")
    assert loading["activationThreshold"] == "0"
    assert "loading" in loading["query"]


@pytest.mark.parametrize(("size", "seconds"), [(1, 300), (100, 60 + 2 * 1024 + 60), (1000, 3600)])
def test_a_server_is_not_taken_away_while_it_loads(size: int, seconds: int, rendered: Rendered) -> None:
    (scaled,) = rendered(block("Autoscaling"), f"model.sizeGiB={size}")["ScaledObject"]
    behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == scaled["spec"]["cooldownPeriod"] == seconds
    hpa = ("autoscaling.keda.enabled=false", "autoscaling.hpa.enabled=true", f"model.sizeGiB={size}")
    (scaler,) = rendered(block("Autoscaling"), *hpa)["HorizontalPodAutoscaler"]
    assert scaler["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == seconds


def test_a_switch_rolls_no_pod_and_a_model_does(rendered: Rendered) -> None:
    before = rendered("")["Deployment"]
    assert rendered("", "optimizations.twoPassHead.enabled=false")["Deployment"] == before
    after = rendered(block("Turning a model back"))["Deployment"]
    assert after[0]["spec"]["template"] != before[0]["spec"]["template"]
    assert after[0]["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def test_groups_of_one_and_a_budget_for_several(rendered: Rendered) -> None:
    (group,) = rendered("leaderWorkerSet: {enabled: true}")["LeaderWorkerSet"]
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 1
    (budget,) = rendered("")["PodDisruptionBudget"]
    assert budget["spec"]["maxUnavailable"] == 1


def test_a_large_model_is_shared_by_two_pods_with_a_gpu_each(rendered: Rendered) -> None:
    (values,) = (text for title, text in BLOCKS if title == "More than one machine" and "leaderWorkerSet" in text)
    objects = rendered(values)
    (group,) = objects["LeaderWorkerSet"]
    template = group["spec"]["leaderWorkerTemplate"]
    assert (group["spec"]["replicas"], template["size"]) == (1, 2)
    for role in ("leaderTemplate", "workerTemplate"):
        pod = template[role]["spec"]
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
        (ranks,) = (one["secret"] for one in pod["volumes"] if one["name"] == "ranks")
        (key,) = ranks["items"]
        made = f"create secret generic {ranks['secretName']} --from-file={key['key']}\n"
        assert made in SECTIONS["More than one machine"]
    assert not objects.get("PodDisruptionBudget")


def test_a_dead_nodes_pods_start_elsewhere_soon(rendered: Rendered) -> None:
    objects = rendered(block("When a node dies"))
    assert [one["tolerationSeconds"] for one in pod(objects)["tolerations"]] == [30, 30]
    assert pod(objects)["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"
