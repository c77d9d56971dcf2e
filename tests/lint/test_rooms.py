"""What a room may import: each kind of forbidden import, added to the real graph, breaks the contract."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

from scripts.rooms import Table, unused, violations

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("service", "engine", "cache", "quant")


@pytest.fixture(scope="module")
def table() -> Table:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = [one for one in settings["contracts"] if one["type"] == "rooms"]
    return Table.read(contract["rooms"], contract["packages"], contract["without"])


@pytest.fixture(scope="module")
def tree() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


@pytest.fixture
def graph(tree: grimp.ImportGraph) -> grimp.ImportGraph:
    """One that a test may change."""
    return copy.deepcopy(tree)


def test_the_tree_keeps_to_the_table(graph: grimp.ImportGraph, table: Table) -> None:
    assert violations(graph, table) == []


def test_the_table_allows_no_more_than_is_used(graph: grimp.ImportGraph, table: Table) -> None:
    assert unused(graph, table) == [], "take these out of the lines in pyproject.toml"


@pytest.mark.parametrize("package", PACKAGES[:2])
def test_the_top_of_a_package_is_no_heap(package: str) -> None:
    assert len(list((ROOT / package).glob("*.py"))) <= 8


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        # The front and the engine: four faces, no more.
        ("service.assembly", "engine.worker"),
        ("service.core", "engine.scheduling"),
        ("service.protocols", "engine.ipc"),
        ("engine.api", "service.config"),
        ("engine.client", "service.assembly"),
        # The cache: its face alone, and of that the engine's protocols alone.
        ("service.core", "cache.seal"),
        ("service.assembly", "cache.store"),
        ("engine.execution", "cache.open"),
        ("engine.kv", "cache.open"),
        ("engine.kv.open_tier", "cache.kv_blocks"),
        ("cache.store", "engine.api"),
        ("cache.api", "cache.store"),
        # quant stands below.
        ("quant", "engine.errors"),
        ("service.core", "quant"),
        ("cache.open", "quant"),
        # Rooms of one package.
        ("service.core", "service.transport"),
        ("service.config", "service.core"),
        ("service.observability", "service.cli"),
        ("engine.scheduling", "engine.execution"),
        ("engine.model", "engine.worker"),
        # Packages of others.
        ("service.core", "grpc"),
        ("engine.api", "grpc"),
        ("cache.open", "grpc"),
        ("service.core", "redis"),
        ("engine.kv", "redis"),
        ("engine.scheduling", "torch"),
        ("service.core", "torch"),
        ("cache.seal", "torch"),
        ("engine.ipc", "pydantic"),
        ("engine.worker", "requests"),
    ],
)
def test_a_forbidden_import_is_found(graph: grimp.ImportGraph, table: Table, importer: str, imported: str) -> None:
    if imported not in graph.modules:
        assert imported == "requests", "that room is gone: name the one that does its work now"
        graph.add_module(imported, is_squashed=True)
    graph.add_import(importer=importer, imported=imported)
    (sentence,) = [one for one in violations(graph, table) if " must do without " not in one]
    assert sentence.startswith(f"{importer} imports {imported}, which no line allows: do without, or write ")


def test_torch_is_found_behind_an_import_that_is_allowed(graph: grimp.ImportGraph, table: Table) -> None:
    with_torch = sorted(
        name for name in graph.find_modules_that_directly_import("torch") if name.startswith("engine.kv.")
    )
    graph.add_import(importer="engine.scheduling", imported=with_torch[0])
    (sentence,) = violations(graph, table)
    assert sentence.startswith("engine.scheduling must do without torch, and reaches it: ")
    assert f"engine.scheduling → {with_torch[0]} → torch" in sentence


@pytest.mark.parametrize(
    "module", ["engine.telemetry", "engine.telemetry.spans", "service.billing", "cache.disk.pages"]
)
def test_a_new_room_is_closed_both_ways(graph: grimp.ImportGraph, table: Table, module: str) -> None:
    room = ".".join(module.split(".")[:2])
    root = room.partition(".")[0]
    graph.add_module(module)
    if room not in graph.modules:
        graph.add_module(room)
    found = violations(graph, table)
    assert len(found) == 1, found
    assert found[0].startswith(f"{room} is a room without a line")
    assert f"add `{room}: …`" in found[0], "it says what to do"
    inside = {"engine": "engine.worker", "service": "service.serving", "cache": "cache.open"}[root]
    graph.add_import(importer=module, imported=f"{root}.api" if root != "service" else "service.version")
    graph.add_import(importer=inside, imported=module)
    assert len(violations(graph, table)) == 3


def test_a_line_without_a_room_is_found(graph: grimp.ImportGraph, table: Table) -> None:
    table = Table({**table.rooms, "engine.gone": ()}, table.packages, table.without)
    assert [one for one in violations(graph, table) if one.startswith("engine.gone has a line and is no module")]


def test_what_a_line_allows_and_nobody_uses_is_found(graph: grimp.ImportGraph, table: Table) -> None:
    rooms = {**table.rooms, "engine.errors": ("engine.api",)}
    packages = {**table.packages, "grpc": (*table.packages["grpc"], "service.config")}
    found = unused(graph, Table(rooms, packages, table.without))
    assert "engine.errors imports nothing of engine.api" in found
    assert "service.config does not import grpc" in found


@pytest.mark.parametrize("line", ["engine.api", "engine.errors: a"])
def test_a_line_that_is_none_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"engine\."):
        Table.read(["engine.errors:", line], [], [])


def test_the_command_fails_and_says_what_to_do(tmp_path: Path) -> None:
    for name in (*PACKAGES, "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "engine" / "errors.py").open("a") as out:
        out.write("\nimport grpc\n")
    (tmp_path / "service" / "billing").mkdir()
    (tmp_path / "service" / "billing" / "__init__.py").touch()
    code = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    said = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "engine.errors (line " in said
    assert "imports grpc, which no line allows: do without, or write `grpc: … engine.errors`" in said
    assert "service.billing is a room without a line" in said
