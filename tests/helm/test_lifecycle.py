"""A release from its installation to its end, by a real Helm, on a stand-in for a cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helm.api_server import Cluster, cluster
from tests.helm.conftest import CHART

pytestmark = pytest.mark.proof

Helm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def there() -> Iterator[Cluster]:
    with cluster("1.32") as one:
        yield one


@pytest.fixture
def release(there: Cluster, helm: Helm, tmp_path: Path) -> Callable[..., list[tuple[str, str, str]]]:
    """Runs a command on the cluster; what it changed there, Helm's own records left out."""
    config = str(there.config(tmp_path))

    def call(*words: str) -> list[tuple[str, str, str]]:
        there.changes.clear()
        done = helm(*words, KUBECONFIG=config)
        assert done.returncode == 0, done.stderr
        return [one for one in there.changes if not one[2].startswith("sh.helm.release")]

    return call


def test_install_upgrade_rollback_and_uninstall(
    there: Cluster, release: Callable[..., list[tuple[str, str, str]]]
) -> None:
    bundled = ("one", str(CHART), "--set", "redis.mode=bundled")
    assert {verb for verb, _, _ in release("install", *bundled, "--wait", "--timeout", "30s")} == {"create"}
    secret = there.named("secrets")["one-whippet-redis"]["data"]
    template = there.named("deployments")["one-whippet"]["spec"]["template"]

    assert release("upgrade", *bundled) == [], "what is made up at the installation stays"
    switches, config = ("update", "configmaps", "one-whippet-switches"), ("update", "configmaps", "one-whippet-config")
    assert release("upgrade", *bundled, "--set", "optimizations.graphs.enabled=false") == [switches]
    assert there.named("deployments")["one-whippet"]["spec"]["template"] == template, "a switch rolls no pod"

    changed = release("upgrade", *bundled, "--set", "model.name=other")
    assert sorted(changed) == sorted([switches, config, ("update", "deployments", "one-whippet")])
    assert there.named("deployments")["one-whippet"]["spec"]["template"] != template, "a model does"

    release("rollback", "one", "1")
    assert there.named("deployments")["one-whippet"]["spec"]["template"] == template
    assert there.named("secrets")["one-whippet-redis"]["data"] == secret

    ran = [name for verb, plural, name in release("test", "one", "--timeout", "30s") if plural == "pods"]
    assert ran == ["one-whippet-smoke", "one-whippet-smoke"]  # made, and removed since it succeeded
    release("uninstall", "one")
    assert {plural for plural, _ in there.objects} <= {"replicasets"}  # which a controller would remove
