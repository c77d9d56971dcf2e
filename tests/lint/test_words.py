"""Names and docstrings use the field's words: no word that docs/glossary.md retires is in a name or a docstring, no two
classes share a name, and a docstring is a sentence."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.figures import ROOT

PACKAGES = ("service", "engine", "cache", "quant", "bench", "scripts")
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
# Likewise, but not in docstrings.
RETIRED_PHRASES = {
    "acquit": "clear",
    "brings": "yields, returns",
    "company": "coalescing",
    "foretell": "predict",
    "foretells": "predicts",
    "foretold": "predicted",
    "hope": "prior",
    "hopes": "priors",
    "mail": "updates",
    "mate": "the other requests",
    "mates": "the other requests",
    "nobody": "no caller, no request",
    "said": "update, delta",
    "shown": "printed, presented",
    "so many": "a number, or the parameter's name",
    "somebody": "a caller, a request",
    "told": "update, delta",
    "watched": "interactive, monitored",
    "wish": "field, request",
    "wishes": "fields, requests",
}
# As whole names, capitalised: each is a plain English word elsewhere.
RETIRED_CLASSES = {"Ask", "Asked", "KvPool", "Looked", "Place", "Places", "Told"}
WARP_LANES = ("engine/kernels/", "quant/checkpoint/")  # where a lane is what CUDA and SIMD call one
# Names that a wrapper shares with its .cu.
SHARED_NAMES = {
    "engine/kernels/batch_sampling.py": {"told"},
    "engine/kernels/rows.py": {"mail", "told"},
}
MIN_WORDS = 4  # of a docstring
_SPOKEN = re.compile(rf"\b({'|'.join(sorted(RETIRED_PHRASES, key=len, reverse=True))})\b", re.IGNORECASE)
_CODE = re.compile(r"`[^`]*`|^ {4}.*$", re.MULTILINE)
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
    newer = name not in SHARED_NAMES.get(path, ())
    return [
        word
        for word in words(name)
        if (word in RETIRED and not (lanes and word in ("lane", "lanes"))) or (newer and word in RETIRED_PHRASES)
    ]


def sources(package: str) -> list[Path]:
    return [path for path in sorted((ROOT / package).rglob("*.py")) if "pb" not in path.parts]


def documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and docstrings of a module and of all that it defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "lineno", 1), text


def fault(text: str) -> str:
    """What is wrong with a docstring; empty where nothing is."""
    if len(text.split()) < MIN_WORDS:
        return "says nothing: delete it, or write a sentence"
    if re.match(r"(Of|By)\b", text):
        return "begins with Of or By: write a sentence with a verb"
    spoken = sorted({one.lower() for one in _SPOKEN.findall(_CODE.sub("", text))})
    return "; ".join(f"{one}: write {RETIRED_PHRASES[one]}" for one in spoken)


def modules(package: str) -> Iterator[tuple[str, ast.Module]]:
    """The modules for which all rules hold."""
    for path in sources(package):
        name = path.relative_to(ROOT).as_posix()
        yield name, ast.parse(path.read_text("utf-8"))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_docstring_is_a_sentence_in_the_fields_words(package: str) -> None:
    found = []
    for name, tree in modules(package):
        found += [f"{name}:{line}: {wrong}" for line, text in documented(tree) if (wrong := fault(text))]
        if ast.get_docstring(tree) is None:
            found.append(f"{name}: the module has no summary")
    assert found == []


def test_no_class_name_stands_twice() -> None:
    places = defaultdict(list)
    for package in PACKAGES:
        for name, tree in modules(package):
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


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
    ("text", "wrong"),
    [
        ("A frame.", "says nothing"),
        ("Of a block, one warp more copies.", "begins with Of"),
        ("By slot, since a sequence ends silently.", "begins with Of or By"),
        ("Returns so many rows at most.", "so many"),
        ("Whoever waits is told later.", "told: write"),
        ("Fills tables of rows by `told` and `mail`.", ""),
        ("Preempts the lowest-ranked background sequence.", ""),
    ],
)
def test_a_fragment_and_a_retired_word_of_a_docstring_are_seen(text: str, wrong: str) -> None:
    assert wrong in fault(text) if wrong else fault(text) == ""


@pytest.mark.parametrize("name", ["told", "_watched", "company", "row_mail", "Foretold", "wishes"])
def test_a_newer_retired_word_is_seen_as_well(name: str) -> None:
    assert retired(name, "service/core/request.py")


@pytest.mark.parametrize(
    "name", ["SingleFlight", "single_flight", "discard", "replace", "placement", "planet", "place", "asked"]
)
def test_other_words_pass(name: str) -> None:
    assert not retired(name)
