"""The security page: every claim has a test that is there, and what it says of the code as a whole holds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from scripts.figures import ROOT
from scripts.sbom import bill

PAGE = ROOT / "docs" / "security.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
FORBIDDEN = frozenset({"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"})
WITHOUT = frozenset({"LLM06", "LLM07", "API7"})  # nothing in the code to show


def rows(section: str) -> list[list[str]]:
    """Cells of a section's table, without its head."""
    text = PAGE.read_text().partition(f"\n## {section}")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def functions_of(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize(("path", "name"), TEST.findall(PAGE.read_text()))
def test_what_shows_a_claim_is_there(path: str, name: str) -> None:
    assert name in functions_of(ROOT / path)


def test_each_line_is_shown_or_is_known_to_have_nothing_to_show() -> None:
    claims = rows("Claims")
    assert len(claims) > 20
    assert all(TEST.search(row[-1]) for row in claims)
    for section, count in (("OWASP Top 10 for LLM", 10), ("OWASP API Security", 10)):
        lines = rows(section)
        assert len(lines) == count
        assert all((TEST.search(row[-1]) is None) == (row[0].split()[0] in WITHOUT) for row in lines)


def unsafe(tree: ast.Module) -> Iterator[int]:
    """Lines that read a pickle, or run a text."""
    for node in ast.walk(tree):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.partition(".")[0] in FORBIDDEN for name in names):
            yield node.lineno
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("eval", "exec", "torch.load") or any(one.arg == "trust_remote_code" for one in node.keywords):
                yield node.lineno


def test_nothing_unpickles_or_runs_a_text() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for package in ("service", "engine", "cache", "quant")
        for path in (ROOT / package).rglob("*.py")
        if (lines := list(unsafe(ast.parse(path.read_text()))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "eval(text)",
        "exec(text)",
        "torch.load(path)",
        "f(x, trust_remote_code=True)",
    ],
)
def test_the_unsafe_is_seen(source: str) -> None:
    assert list(unsafe(ast.parse(source))) == [1]


def test_the_bill_of_materials_has_what_is_installed() -> None:
    found = bill(list(distributions()))
    names = {part["name"] for part in found["components"]}
    assert {"grpcio", "redis", "safetensors", "torch", "msgspec"} <= names
    assert all(
        part["purl"] == f"pkg:pypi/{part['name']}@{part['version'].replace('+', '%2B')}" for part in found["components"]
    )
    assert len({part["bom-ref"] for part in found["components"]}) == len(found["components"])
