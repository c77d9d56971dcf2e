"""Words that docs/glossary.md retires are in no identifier and no file name of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.figures import ROOT

PACKAGES = ("service", "engine", "cache", "quant", "bench")
# Word → what is written instead. As parts of any name.
RETIRED = {
    "card": "device, gpu",
    "cards": "devices, gpus",
    "enrolled": "directory",
    "fleet": "alternating pipelines",
    "flight": "single flight, shared generation, decode pipeline",
    "flights": "single flight, shared generation, decode pipeline",
    "ground": "context",
    "lane": "connection, pipeline row",
    "lanes": "connections, pipeline rows",
    "seat": "row state",
    "seats": "row states",
    "shelf": "candidate store",
    "sourcing": "lookup",
}
# As whole names, capitalised: each is a plain English word elsewhere.
RETIRED_CLASSES = {"Ask", "Asked", "KvPool", "Looked", "Place", "Places", "Told"}
WARP_LANES = ("engine/kernels/", "quant/checkpoint/")  # where a lane is what CUDA and SIMD call one
ALLOWED = ("single_flight", "in_flight")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def words(name: str) -> list[str]:
    """`GraphCard` and `graph_card` are graph and card."""
    plain = "_".join(WORD.findall(name)).lower()
    for allowed in ALLOWED:
        plain = plain.replace(allowed, "")
    return plain.split("_")


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that a module makes; attributes and names that it only uses are somebody's definition, too."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield line, node.name
        elif isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, ast.arg | ast.keyword) and node.arg is not None:
            yield line, node.arg
        elif isinstance(node, ast.alias):
            yield line, node.asname or node.name


def retired(name: str, path: str = "") -> list[str]:
    if name.lstrip("_") in RETIRED_CLASSES:
        return [name]
    lanes = path.startswith(WARP_LANES)
    return [word for word in words(name) if word in RETIRED and not (lanes and word in ("lane", "lanes"))]


def sources(package: str) -> list[Path]:
    return [path for path in sorted((ROOT / package).rglob("*.py")) if "pb" not in path.parts]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_identifier_and_no_file_has_a_retired_word(package: str) -> None:
    found = []
    for path in sources(package):
        name = str(path.relative_to(ROOT))
        found += [f"{name}: the file" for _ in retired(path.stem, name)]
        tree = ast.parse(path.read_text("utf-8"))
        lines = {(line, one) for line, one in identifiers(tree) if retired(one, name)}
        found += [f"{name}:{line}: {one}" for line, one in sorted(lines)]
    assert found == []


@pytest.mark.parametrize(
    "name", ["CardLinear", "card", "open_lane", "Flight", "shared_flight", "_ground", "SeatState", "_Told"]
)
def test_a_retired_word_is_seen_in_any_spelling(name: str) -> None:
    assert retired(name)


@pytest.mark.parametrize(
    "name", ["SingleFlight", "single_flight", "discard", "replace", "placement", "planet", "place", "asked"]
)
def test_other_words_pass(name: str) -> None:
    assert not retired(name)
