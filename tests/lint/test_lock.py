"""Requirements of the images: all that pyproject.toml asks for, in the versions that are tested, with hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.lock import MAKERS, TARGETS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_ENTRY = re.compile(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def entries(name: str) -> dict[str, Version]:
    """Package → version; every line of the file belongs to an entry with a hash, or is a comment."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    left = _ENTRY.sub("", text).strip().splitlines()
    assert [line for line in left if line and not line.startswith("#")] == []
    return {canonicalize_name(package): Version(version) for package, version, _ in _ENTRY.findall(text)}


def known_versions() -> dict[str, Version]:
    pairs = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    return {canonicalize_name(package): Version(version) for package, version in pairs}


@pytest.mark.parametrize("target", TARGETS)
def test_a_lock_has_all_that_the_project_asks_for(target: str) -> None:
    locked = entries(target) | entries("embedder")
    asked = [*PROJECT["dependencies"]]
    for extra in TARGETS[target]:
        asked += PROJECT["optional-dependencies"][extra]
    for requirement in map(Requirement, asked):
        assert locked[canonicalize_name(requirement.name)] in requirement.specifier, f"run make lock: {requirement}"


@pytest.mark.parametrize("name", [*TARGETS, "embedder", "build"])
def test_a_lock_has_the_versions_that_are_tested(name: str) -> None:
    locked, known = entries(name), known_versions()
    other = {package for package in locked.keys() & known if locked[package] != known[package]}
    assert not other, "run make lock"


def test_the_lock_of_a_cpu_has_nothing_of_cuda() -> None:
    locked = entries("cpu")
    assert locked["torch"].local == "cpu"
    assert not [package for package in locked if package.startswith(("nvidia-", "cuda-", "triton"))]


@pytest.mark.parametrize("target", TARGETS)
def test_what_exports_the_embedder_is_not_shipped(target: str) -> None:
    assert not entries(target).keys() & entries("embedder").keys()
    assert set(MAKERS) <= entries("embedder").keys()


def test_what_builds_our_wheel_is_locked() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    locked = entries("build")
    for requirement in map(Requirement, needed):
        assert locked[canonicalize_name(requirement.name)] in requirement.specifier
