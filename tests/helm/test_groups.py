"""Groups of pods that share one model: the leader pod is the server, and the worker pods compute for it."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml

from service.cli import COMMANDS, rank
from service.cli.channel import USAGE
from tests.helm.conftest import Object
from tests.helm.test_templates import GROUP, TOKENS, VERSIONS, Render, of_kind, only

pytestmark = pytest.mark.proof

LEADER = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}  # a label that the controller sets
SOURCES: dict[str, tuple[str, ...]] = {
    "demo": (),
    "pvc": ("model.source=pvc", "model.path=", TOKENS),
    "initContainer": ("model.source=initContainer", "model.initContainer.image=fetch@sha256:0", TOKENS),
    "image": ("model.source=image", "model.image.reference=models/qwen@sha256:0", TOKENS),
}
CHECKED = f"model.manifest={'0' * 64}  config.json"
SECRETS = ("tls.existingSecret=tls", TOKENS, "auth.tenants.existingSecret=quotas", "redis.mode=bundled")


def group(objects: list[Object]) -> Object:
    """The template of a group."""
    return dict(only(objects, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"])


def container(template: Object) -> Object:
    (one,) = template["spec"]["containers"]
    return dict(one)


def mounted(template: Object) -> dict[str, str]:
    """Names of volumes, each with where it is mounted."""
    return {one["name"]: one["mountPath"] for one in container(template)["volumeMounts"]}


def volumes(template: Object) -> dict[str, Object]:
    return {one["name"]: one for one in template["spec"]["volumes"]}


def config(objects: list[Object]) -> Any:
    return yaml.safe_load(only(objects, "ConfigMap", "one-whippet-config")["data"]["config.yaml"])


def test_the_leader_pod_is_the_server_and_awaits_the_ranks_of_the_workers(render: Render) -> None:
    alone = only(render("tensorParallel=4", "gpu.count=4"), "Deployment")["spec"]["template"]
    objects = render(*GROUP)
    leader = group(objects)["leaderTemplate"]
    assert config(objects)["tensor-parallel"] == 4
    assert config(objects)["engine"] == {
        "ranks-elsewhere": 2,
        "ranks-listen": "0.0.0.0:50061",
        "ranks-secret-file": "/etc/whippet/ranks/secret",
    }
    assert volumes(leader)["ranks"]["secret"]["items"] == [{"key": "secret", "path": "secret"}]

    own = container(leader)
    assert own["ports"].pop() == {"name": "ranks", "containerPort": 50061, "protocol": "TCP"}
    assert own["volumeMounts"].pop() == {"name": "ranks", "mountPath": "/etc/whippet/ranks", "readOnly": True}
    assert leader["spec"]["volumes"].pop()["name"] == "ranks"
    assert own["resources"]["limits"].pop("nvidia.com/gpu") == 2
    assert container(alone)["resources"]["limits"].pop("nvidia.com/gpu") == 4
    assert leader["spec"] == alone["spec"]


@pytest.mark.parametrize(("size", "ranks"), [(2, 8), (4, 4), (16, 1)])
def test_ranks_are_divided_over_the_pods(size: int, ranks: int, render: Render) -> None:
    objects = render(*GROUP, f"leaderWorkerSet.size={size}", "tensorParallel=16", f"gpu.count={ranks}")
    assert group(objects)["size"] == size
    assert config(objects)["engine"]["ranks-elsewhere"] == 16 - ranks
    assert container(group(objects)["workerTemplate"])["args"][-2:] == ["--ranks", str(ranks)]
    for role in ("leaderTemplate", "workerTemplate"):
        assert container(group(objects)[role])["resources"]["limits"]["nvidia.com/gpu"] == ranks


def test_a_group_on_cpus_asks_for_no_gpu(render: Render) -> None:
    for role in ("leaderTemplate", "workerTemplate"):
        assert "nvidia.com/gpu" not in container(group(render(*GROUP, "gpu.count=0"))[role])["resources"]["limits"]


def test_a_worker_pod_computes_for_its_leader_and_serves_nothing(render: Render) -> None:
    more = ("extraEnvVars[0].name=NCCL_SOCKET_IFNAME", "extraEnvVars[0].value=eth1")
    templates = group(render(*GROUP, *more))
    worker = container(templates["workerTemplate"])
    leader = ["--leader", "$(LWS_LEADER_ADDRESS):50061"]
    assert worker["args"] == ["rank", *leader, "--secret-file", "/etc/whippet/ranks/secret", "--ranks", "2"]
    assert worker["env"] == container(templates["leaderTemplate"])["env"]
    assert "ports" not in worker
    assert not [key for key in worker if key.endswith("Probe")]
    assert templates["workerTemplate"]["spec"]["terminationGracePeriodSeconds"] == 10


def test_whippet_takes_the_command_of_a_worker_pod(render: Render, capsys: pytest.CaptureFixture[str]) -> None:
    """All flags are known; the secret of the pod is not here."""
    command, *flags = container(group(render(*GROUP))["workerTemplate"])["args"]
    assert COMMANDS[command][0] == rank.__name__
    assert rank.run(flags) == USAGE
    assert "--secret-file: " in capsys.readouterr().err


@pytest.mark.parametrize("source", SOURCES)
def test_pods_of_a_group_have_the_same_model_and_the_same_place(source: str, render: Render) -> None:
    place = ("nodeSelector.gpu=h200", "runtimeClassName=nvidia", "priorityClassName=high", "tolerations[0].key=gpu")
    templates = group(render(*GROUP, *SOURCES[source], CHECKED, *place))
    leader, worker = templates["leaderTemplate"], templates["workerTemplate"]
    assert leader["metadata"] == worker["metadata"]
    differ = {"containers", "volumes", "terminationGracePeriodSeconds"}
    assert {key: one for key, one in worker["spec"].items() if key not in differ} == {
        key: one for key, one in leader["spec"].items() if key not in differ
    }
    assert {"nodeSelector", "runtimeClassName", "priorityClassName", "tolerations"} <= worker["spec"].keys()
    for key in ("image", "imagePullPolicy", "resources", "securityContext"):
        assert container(worker)[key] == container(leader)[key]
    assert mounted(worker).items() <= mounted(leader).items()
    assert all(volumes(leader)[name] == one for name, one in volumes(worker).items())
    assert ("model" in mounted(worker)) == (source != "demo")


def test_secrets_of_callers_and_caches_stay_in_the_leader_pod(render: Render) -> None:
    templates = group(render(*GROUP, *SECRETS))
    assert {"tls", "tokens", "tenants", "redis"} <= mounted(templates["leaderTemplate"]).keys()
    assert mounted(templates["workerTemplate"]).keys() == {"cache", "tmp", "ranks"}
    assert volumes(templates["workerTemplate"]).keys() == {"cache", "tmp", "ranks"}
    for one in templates["leaderTemplate"]["spec"]["volumes"]:
        assert "secret" not in one or one["secret"]["defaultMode"] == 0o440


def test_only_leader_pods_take_calls_and_are_scraped(render: Render) -> None:
    pool = ("inferencePool.enabled=true", "inferencePool.endpointPicker=picker", "replicaCount=2")
    objects = render(*GROUP, *pool, "metrics.serviceMonitor.enabled=true", "redis.mode=bundled")
    everywhere = group(objects)["workerTemplate"]["metadata"]["labels"]
    for name in ("one-whippet", "one-whippet-headless"):
        assert only(objects, "Service", name)["spec"]["selector"] == {**everywhere, **LEADER}
    assert only(objects, "InferencePool")["spec"]["selector"]["matchLabels"] == {**everywhere, **LEADER}
    # The monitor selects Services, not pods.
    assert not LEADER.items() & only(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
    assert not LEADER.items() & only(objects, "Service", "one-whippet-redis")["spec"]["selector"].items()


def test_a_group_that_lacks_a_worker_uses_the_disruption_budget_up(render: Render) -> None:
    objects = render(*GROUP, "replicaCount=2")
    budget = only(objects, "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    for role in ("leaderTemplate", "workerTemplate"):
        assert group(objects)[role]["metadata"]["labels"] == budget["selector"]["matchLabels"]


def test_pods_of_a_group_reach_each_other_on_ports_that_nobody_else_reaches(render: Render) -> None:
    objects = render(*GROUP)
    policy = only(objects, "NetworkPolicy", "one-whippet")["spec"]
    ours = [{"podSelector": {"matchLabels": group(objects)["workerTemplate"]["metadata"]["labels"]}}]
    assert policy["podSelector"] == ours[0]["podSelector"]
    every_port = [{"protocol": "TCP"}]
    assert policy["ingress"].pop() == {"from": ours, "ports": every_port}
    assert {"to": ours, "ports": every_port} in policy["egress"]
    open_to_others = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert open_to_others == {50051, 50052, 50053, 9090}


def test_the_leader_pod_is_kept_and_its_name_resolves_before_it_is_ready(render: Render) -> None:
    """The controller makes a headless Service of the set's name, unless there is another Service of that name."""
    objects = render(*GROUP)
    assert group(objects)["restartPolicy"] == "None"
    name = only(objects, "LeaderWorkerSet")["metadata"]["name"]
    assert name == "one-whippet-group"
    assert name not in {one["metadata"]["name"] for one in of_kind(objects, "Service")}


def test_names_of_pods_fit_into_labels(render: Render) -> None:
    """Each pod has a label of its StatefulSet's name and ten characters more."""
    objects = render(*GROUP, f"fullnameOverride={'a' * 52}")
    name = only(objects, "LeaderWorkerSet")["metadata"]["name"]
    assert len(f"{name}-999-0123456789") <= 63


@pytest.mark.parametrize("source", SOURCES)
def test_both_pods_are_valid_and_restricted(source: str, render: Render) -> None:
    templates = group(render(*GROUP, *SOURCES[source], CHECKED))
    for role in ("leaderTemplate", "workerTemplate"):
        pod = {"apiVersion": "v1", "kind": "Pod", **templates[role]}
        for version in VERSIONS[1 if source == "image" else 0 :]:
            kubernetes_validate.validate(pod, version, strict=True)
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        for one in (*pod["spec"]["initContainers"], *pod["spec"]["containers"]):
            assert one["securityContext"]["readOnlyRootFilesystem"] is True
            assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("sets", [(), ("tensorParallel=2", "gpu.count=2"), ("leaderWorkerSet.secretName=unused",)])
def test_a_group_of_one_pod_is_the_server_of_a_deployment(sets: tuple[str, ...], render: Render) -> None:
    deployed = {(one["kind"], one["metadata"]["name"]): one for one in render(*sets)}
    objects = render(*sets, "leaderWorkerSet.enabled=true")
    alone = only(objects, "LeaderWorkerSet", "one-whippet")["spec"]
    assert alone["leaderWorkerTemplate"] == {
        "size": 1,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "workerTemplate": deployed.pop(("Deployment", "one-whippet"))["spec"]["template"],
    }
    objects.remove(only(objects, "LeaderWorkerSet"))
    assert {(one["kind"], one["metadata"]["name"]): one for one in objects} == deployed
