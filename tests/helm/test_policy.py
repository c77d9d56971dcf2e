"""checkov's policies for pods, by their ids, each with a change that breaks it. `make policy` asks checkov itself; its
other policies are about arguments of Kubernetes' own servers, or about kinds that the chart does not have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.conftest import CHART, NAMESPACE, Object

pytestmark = pytest.mark.proof

Holds = Callable[[Object, Object], bool]  # of a pod's spec and one of its containers
Breaks = Callable[[Object, Object], Any]
DIGEST = "@sha256:"


def quantity(of: str, what: str) -> Holds:
    return lambda pod, one: bool(one["resources"][of].get(what))


def probed(kind: str) -> Holds:
    """What serves is probed; what comes to an end by itself is not."""
    return lambda pod, one: kind in one or one in pod.get("initContainers", []) or pod.get("restartPolicy") == "Never"


def context(key: str, value: Any, default: Any = None) -> Holds:
    """Of the container or, where it says nothing, of the pod."""
    return lambda pod, one: one["securityContext"].get(key, pod["securityContext"].get(key, default)) == value


def sets(key: str, value: Any) -> Breaks:
    return lambda pod, one: one["securityContext"].update({key: value})


def images(pod: Object, one: Object) -> list[str]:
    """Parts of the image's name."""
    return str(one["image"]).split(DIGEST)


def capabilities(pod: Object, one: Object) -> Object:
    return dict(one["securityContext"]["capabilities"])


POLICIES: dict[str, tuple[Holds, Breaks]] = {
    "CKV_K8S_8 liveness probe": (probed("livenessProbe"), lambda pod, one: one.pop("livenessProbe")),
    "CKV_K8S_9 readiness probe": (probed("readinessProbe"), lambda pod, one: one.pop("readinessProbe")),
    "CKV_K8S_10 CPU request": (quantity("requests", "cpu"), lambda pod, one: one["resources"]["requests"].pop("cpu")),
    "CKV_K8S_12 memory request": (
        quantity("requests", "memory"),
        lambda pod, one: one["resources"]["requests"].pop("memory"),
    ),
    "CKV_K8S_13 memory limit": (
        quantity("limits", "memory"),
        lambda pod, one: one["resources"]["limits"].pop("memory"),
    ),
    "CKV_K8S_14 tag, CKV_K8S_43 digest": (
        lambda pod, one: len(images(pod, one)[-1]) == 64,
        lambda pod, one: one.update(image="whippet:1"),
    ),
    "CKV_K8S_16 privileged": (context("privileged", False, False), sets("privileged", True)),
    "CKV_K8S_17 host's processes": (lambda pod, one: "hostPID" not in pod, lambda pod, one: pod.update(hostPID=True)),
    "CKV_K8S_18 host's IPC": (lambda pod, one: "hostIPC" not in pod, lambda pod, one: pod.update(hostIPC=True)),
    "CKV_K8S_19 host's network": (
        lambda pod, one: "hostNetwork" not in pod,
        lambda pod, one: pod.update(hostNetwork=True),
    ),
    "CKV_K8S_20 escalation": (context("allowPrivilegeEscalation", False), sets("allowPrivilegeEscalation", True)),
    "CKV_K8S_22 read-only root": (context("readOnlyRootFilesystem", True), sets("readOnlyRootFilesystem", False)),
    "CKV_K8S_23 root, CKV_K8S_29 and 30 a context": (context("runAsNonRoot", True), sets("runAsNonRoot", False)),
    "CKV_K8S_25 and 39 capabilities added": (
        lambda pod, one: "add" not in capabilities(pod, one),
        sets("capabilities", {"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
    ),
    "CKV_K8S_28 and 37 capabilities dropped": (
        lambda pod, one: capabilities(pod, one).get("drop") == ["ALL"],
        sets("capabilities", {"drop": ["KILL"]}),
    ),
    "CKV_K8S_26 host's ports": (
        lambda pod, one: not any("hostPort" in port for port in one.get("ports", [])),
        lambda pod, one: one.update(ports=[{"hostPort": 80}]),
    ),
    "CKV_K8S_27 host's files, a daemon's socket among them": (
        lambda pod, one: not any("hostPath" in volume for volume in pod["volumes"]),
        lambda pod, one: pod["volumes"].append({"hostPath": {"path": "/var/run/docker.sock"}}),
    ),
    "CKV_K8S_31 seccomp": (context("seccompProfile", {"type": "RuntimeDefault"}), sets("seccompProfile", None)),
    "CKV_K8S_33, 34 and 159 foreign images": (
        lambda pod, one: images(pod, one)[0] in ("whippet", "redis", "fetch"),
        lambda pod, one: one.update(image=f"git-sync{DIGEST}{'0' * 64}"),
    ),
    "CKV_K8S_35 secrets in the environment": (
        lambda pod, one: "envFrom" not in one and "secretKeyRef" not in yaml.safe_dump(one.get("env")),
        lambda pod, one: one.update(env=[{"name": "A", "valueFrom": {"secretKeyRef": {}}}]),
    ),
    "CKV_K8S_38 token of the service account": (
        lambda pod, one: pod["automountServiceAccountToken"] is False,
        lambda pod, one: pod.update(automountServiceAccountToken=True),
    ),
    "CKV_K8S_40 high user": (
        lambda pod, one: pod["securityContext"]["runAsUser"] >= 10_000 and "runAsUser" not in one["securityContext"],
        lambda pod, one: pod["securityContext"].update(runAsUser=1000),
    ),
}


@pytest.fixture(scope="module")
def shared() -> dict[str, list[Object]]:
    return {}


@pytest.fixture
def objects(helm: Any, shared: dict[str, list[Object]]) -> list[Object]:
    """With the values of `make policy`."""
    if not shared:
        values = str(Path(__file__).with_name("policy.yaml"))
        words = ("one", str(CHART), "--namespace", NAMESPACE, "--kube-version", "1.32.0", "-f", values)
        done = helm("template", *words)
        assert done.returncode == 0, done.stderr
        shared["objects"] = [one for one in yaml.safe_load_all(done.stdout) if one]
    return shared["objects"]


def pods(objects: list[Object]) -> Iterator[Object]:
    """All that are made of these objects, with their labels."""
    for one in objects:
        if one["kind"] == "Pod":
            yield one
        elif one["kind"] in ("Deployment", "StatefulSet"):
            yield one["spec"]["template"]


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", []), *pod["containers"]]


@pytest.mark.parametrize("name", POLICIES)
def test_policies_of_pods(name: str, objects: list[Object]) -> None:
    holds, breaks = POLICIES[name]
    specs = [pod["spec"] for pod in pods(objects)]
    assert [len(containers(spec)) for spec in specs] == [3, 1, 1]
    for spec in specs:
        assert all(holds(spec, one) for one in containers(spec))
    broken = copy.deepcopy(specs[0])
    breaks(broken, broken["containers"][0])
    assert not holds(broken, broken["containers"][0])


def test_every_pod_has_a_network_policy(objects: list[Object]) -> None:
    """CKV2_K8S_6."""
    policies = [one["spec"]["podSelector"]["matchLabels"].items() for one in objects if one["kind"] == "NetworkPolicy"]
    for pod in pods(objects):
        assert any(labels <= pod["metadata"]["labels"].items() for labels in policies)


def test_nothing_is_of_the_default_namespace_or_account(objects: list[Object]) -> None:
    """CKV_K8S_21 and CKV_K8S_41."""
    assert all(one["metadata"]["namespace"] == NAMESPACE for one in objects)
    accounts = [one for one in objects if one["kind"] == "ServiceAccount"]
    assert [one["metadata"]["name"] for one in accounts] == ["one-whippet"]
