"""Which tier each test belongs to. `--tier`, once or more, selects tiers; without it pytest runs whatever is named.

    lint         checks files against each other: documents, generated code, names, locks. `make lint` runs it.
    check        starts no process (but a compiler, where the products of a CPU are not compiled yet) and takes a second
                 at most. Run before each commit.
    test         proves the product with real servers, Redis and tools, whatever else the machine does.
    proofs       needs minutes or a quiet machine: soak, timing, attack, every setting through a whole server.
    isa          tests of all tiers marked `isa`, which take another path on a CPU with other vector units.
    properties   property tests of all tiers, so that proofs can draw more examples.

A test is in `check` unless it is marked `product` or `proof`, uses a fixture that starts a process (`STARTING`), or
lies in a folder of `FOLDERS`. A test in `check` that starts a process fails, on every machine. Tests that need a GPU
are in no tier: `pytest -m gpu` runs them where there is one.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing.util
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import is_hypothesis_test

TIERS = ("lint", "check", "test", "proofs", "isa", "properties")
FOLDERS = {"tests/lint/": "lint", "tests/proofs/": "proofs", "tests/timing/": "proofs"}
ROOT = Path(__file__).resolve().parents[1]
# Fixtures that start a process when they are made.
STARTING = frozenset({"exported_embedder", "make_redis", "redis_server", "shared_redis", "template"})
_FILE_MARK = re.compile(r"^pytestmark = \[?(?:.*, )?pytest\.mark\.(gpu|product|proof)\b", re.MULTILINE)
# Tiers that a file with such a mark can have tests in.
_MARKED = {"gpu": (), "product": ("test", "proofs"), "proof": ("proofs",)}
# What the text of a file contains that has tests in a tier: the mark, or a parameter whose fixture starts a process.
_NAMED = {
    "test": re.compile(
        r"mark\.product|\b(?:serve: Serve|server: Server|cached: Server|store: Store"
        r"|(?:template|redis_server|make_redis|shared_redis|exported_embedder|embedder):)"
    ),
    "proofs": re.compile(r"mark\.proof"),
}
# Selections that go across the tiers, and what a file needs to say to have tests in them.
_ACROSS = {"isa": "pytest.mark.isa", "properties": "hypothesis"}
_COMPILED = "engine/linear/walk.c"
_guarded = False


def tier_of(item: pytest.Item) -> str:
    """The tier of a collected test."""
    if folder := next((folder for folder in FOLDERS if item.nodeid.startswith(folder)), None):
        return FOLDERS[folder]
    if item.get_closest_marker("proof"):
        return "proofs"
    if item.get_closest_marker("product") or STARTING.intersection(getattr(item, "fixturenames", ())):
        return "test"
    return "check"


def selected(item: pytest.Item, tier: str) -> bool:
    if item.get_closest_marker("gpu"):
        return False
    if tier == "isa":
        return item.get_closest_marker("isa") is not None
    if tier == "properties":
        return is_hypothesis_test(getattr(item, "obj", None))
    return tier_of(item) == tier


@functools.cache
def unneeded(path: Path, tier: str) -> bool:
    """Whether no test of a file can be in the tier, judged by its text: importing all files takes seconds."""
    if path.suffix != ".py" or not path.name.startswith("test_"):
        return False
    relative = path.relative_to(ROOT).as_posix()
    folder = next((folder for folder in FOLDERS if relative.startswith(folder)), None)
    if folder is not None:
        return tier != FOLDERS[folder] and tier not in _ACROSS
    if tier == "lint":
        return True
    text = path.read_text()
    if tier in _ACROSS:
        return _ACROSS[tier] not in text
    if tier in _NAMED and not _NAMED[tier].search(text):
        return True
    found = _FILE_MARK.search(text)
    return found is not None and tier not in _MARKED[found[1]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", action="append", choices=TIERS, help="run one tier's tests alone (tests/tiers.py)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    tiers = config.getoption("--tier")
    if not tiers or not collection_path.is_file():
        return None
    return all(unneeded(collection_path, tier) for tier in tiers) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Turns cycle collection off while tests are imported, which it would make a third slower, and then excludes all
    that was imported from it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _ensure_found(items: list[pytest.Item]) -> None:
    """Raises where a tier would lose tests, since `unneeded` skips their file. The tier `check` calls this, since it
    imports all files that are judged by a name."""
    for item in items:
        if (tier := tier_of(item)) in _NAMED and unneeded(item.path, tier):
            raise pytest.UsageError(
                f"{item.nodeid} is in `{tier}`, and no name in its file says so: see tests/tiers.py"
            )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if tiers := config.getoption("--tier"):
        if "check" in tiers:
            _ensure_found(items)
        chosen = {id(item) for item in items if any(selected(item, tier) for tier in tiers)}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
        items[:] = [item for item in items if id(item) in chosen]


def _compiles_products(arguments: tuple[Any, ...]) -> bool:
    """Whether a process compiles the products of a CPU, which are kept until their source changes."""
    return any(isinstance(one, list) and any(str(part).endswith(_COMPILED) for part in one) for one in arguments)


def _guard(owner: Any, name: str) -> None:
    """Replaces a function that starts a process by one that refuses to in a test of `check`."""
    start = getattr(owner, name)

    @functools.wraps(start)
    def guarded(*arguments: Any, **options: Any) -> Any:
        if _guarded and not _compiles_products(arguments):
            raise RuntimeError("this test starts a process: mark it `product` (tests/tiers.py)")
        return start(*arguments, **options)

    setattr(owner, name, guarded)


for _owner, _name in (
    (subprocess.Popen, "__init__"),
    (os, "fork"),
    (os, "posix_spawn"),
    (multiprocessing.util, "spawnv_passfds"),
):
    _guard(_owner, _name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Keeps tests of `check` from starting processes."""
    global _guarded
    _guarded = tier_of(item) == "check" and item.get_closest_marker("gpu") is None
    try:
        return (yield)
    finally:
        _guarded = False
