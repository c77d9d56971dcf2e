"""Tests lie in the same rooms under the same names as the code that they test.

`tests/engine/kv/test_page_pool.py` tests `engine/kv/page_pool.py`. A file about several modules of a room has a name of
its own, which no module of another room has, so that a reader finds the tests of a module in one place. Helpers have no
`test_` in front. Beside the rooms lie `contract` (rules for the whole tree), `e2e` (whole servers as a user starts
them), `lint` (files against each other), and `proofs` and `timing` (tests that need long or a quiet machine).
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
BESIDE = {"contract", "e2e", "lint", "proofs", "timing"}
FILES = sorted(path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))
HERE = [path for path in FILES if path.parts[0] not in BESIDE]


def names_in(room: Path) -> set[str]:
    """The room itself, and modules and rooms in it."""
    return {room.name} | {path.stem for path in (ROOT / room).rglob("*") if path.is_dir() or path.suffix == ".py"}


def names_beside(room: Path) -> set[str]:
    """Modules of the other rooms of its package."""
    package = ROOT / room.parts[0]
    return {path.stem for path in package.rglob("*.py") if not path.is_relative_to(ROOT / room)} - {"__init__"}


def misplaced(path: Path) -> str | None:
    """What is wrong with the place or the name of a test file."""
    room, name = path.parent, path.stem.removeprefix("test_").removeprefix("gpu_")
    if not (ROOT / room).is_dir():
        return f"there is no {room}"
    if any(name == one or name.startswith(f"{one}_") for one in names_in(room)):
        return None
    return f"a module of that name is in another room of {room.parts[0]}" if name in names_beside(room) else None


def test_every_test_has_a_room() -> None:
    assert len(HERE) > 100
    assert {path.parts[0] for path in FILES} - {path.parts[0] for path in HERE} <= BESIDE
    assert not [path for path in FILES if len(path.parts) == 1]


@pytest.mark.parametrize("path", HERE, ids=str)
def test_it_lies_where_its_subject_lies(path: Path) -> None:
    assert misplaced(path) is None


@pytest.mark.parametrize(
    "wrong", ["engine/linear/test_page_pool.py", "engine/attic/test_page_pool.py", "cache/seal/test_memory.py"]
)
def test_a_test_in_the_wrong_room_is_seen(wrong: str) -> None:
    assert misplaced(Path(wrong)) is not None
