"""Cores by affinity and by control groups, in trees as kernels and container runtimes lay them out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.cores import usable_cores


@pytest.fixture(autouse=True)
def eight_by_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def tree(root: Path, groups: str, **files: str) -> Path:
    """`__` in a name stands for a folder, `C` for a comma."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = (
            root
            / "sys/fs/cgroup"
            / name.replace("C", ",").replace("__", "/").replace("cpu_max", "cpu.max").replace("cpu_cfs", "cpu.cfs")
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8)],
)
def test_a_container_of_version_2(tmp_path: Path, quota: str, cores: int) -> None:
    assert usable_cores(tree(tmp_path, "0::/\n", cpu_max=quota)) == cores


def test_the_tightest_of_nested_groups(tmp_path: Path) -> None:
    files = {"a__b__cpu_max": "max 100000", "a__cpu_max": "300000 100000", "cpu_max": "700000 100000"}
    assert usable_cores(tree(tmp_path, "0::/a/b\n", **files)) == 3


@pytest.mark.parametrize("mount", ["cpuCcpuacct", "cpu"])
def test_version_1(tmp_path: Path, mount: str) -> None:
    files = {f"{mount}__pod__cpu_cfs_quota_us": "450000", f"{mount}__pod__cpu_cfs_period_us": "100000"}
    files |= {f"{mount}__cpu_cfs_quota_us": "-1", f"{mount}__cpu_cfs_period_us": "100000"}
    assert usable_cores(tree(tmp_path, "11:memory:/pod\n4:cpu,cpuacct:/pod\n1:name=systemd:/pod\n", **files)) == 4


def test_both_versions_at_once(tmp_path: Path) -> None:
    files = {"cpu__cpu_cfs_quota_us": "-1", "cpu__cpu_cfs_period_us": "100000", "unified__x__cpu_max": "300000 100000"}
    assert usable_cores(tree(tmp_path, "3:cpu:/\n0::/x\n", **files)) == 3


def test_a_path_of_the_host_is_looked_up_from_where_we_are(tmp_path: Path) -> None:
    assert usable_cores(tree(tmp_path, "0::/kubepods/pod1/c1\n", cpu_max="200000 100000")) == 2
    other = tmp_path / "other"
    assert usable_cores(tree(other, "0::/../../elsewhere\n", cpu_max="200000 100000")) == 2


@pytest.mark.parametrize("broken", ["", "x y", "0 100000", "100000 0", "100000", "-5 100000"])
def test_what_makes_no_sense_limits_nothing(tmp_path: Path, broken: str) -> None:
    assert usable_cores(tree(tmp_path, "0::/\nrubbish\n::\n", cpu_max=broken)) == 8


def test_without_control_groups(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8
    assert usable_cores() >= 1
