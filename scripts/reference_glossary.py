"""Writes docs/glossary.md from docs/glossary.yaml, and checks that the code has what it names."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scripts.cells import table

HEAD = """# Glossary

`make docs` writes this page from `docs/glossary.yaml`, and lint compares that table with the code.

Where the field has a word, Whippet uses it as vLLM, llama.cpp and CUDA's manuals do: CUDA graph, chunked prefill,
continuous batching, paged KV cache, preemption, prefix caching, speculative decoding, draft and target model, logits,
perplexity. Below are words of our own, and words of the field that have a narrower meaning here. Each has one meaning,
in code, documents and logs.
"""


@dataclass(frozen=True)
class Term:
    """A word, its meaning, and where the code has it: `PATH` or `PATH:NAME`."""

    word: str
    meaning: str
    code: tuple[str, ...]


@dataclass(frozen=True)
class Glossary:
    terms: tuple[Term, ...]
    retired: tuple[tuple[str, str], ...]  # word, what is written instead


def read_glossary(root: Path) -> Glossary:
    """Reads the table of a tree. Raises ValueError where it is out of order or a word stands twice."""
    data: dict[str, Any] = yaml.safe_load((root / "docs" / "glossary.yaml").read_text("utf-8"))
    terms = tuple(Term(one["word"], one["meaning"], tuple(one["code"])) for one in data["terms"])
    words = [term.word for term in terms]
    if words != sorted(set(words)):
        raise ValueError("the words of docs/glossary.yaml are to be in alphabetical order, each once")
    return Glossary(terms, tuple((one["instead"], one["write"]) for one in data["retired"]))


def glossary_page(root: Path) -> str:
    glossary = read_glossary(root)
    terms = ([term.word, term.meaning, ", ".join(map(linked, term.code))] for term in glossary.terms)
    return "\n".join(
        [
            HEAD,
            table(["word", "meaning", "in the code"], terms),
            "## Words that are not used\n",
            table(["instead of", "write"], glossary.retired),
        ]
    )


def linked(place: str) -> str:
    """Formats `NAME` in `PATH`, or the path alone."""
    path, _, name = place.partition(":")
    return f"`{name}` in `{path}`" if name else f"`{path}`"


def lacking(root: Path, terms: Iterable[Term]) -> list[str]:
    """Places of the table that the tree does not have."""
    return [f"{term.word}: {place}" for term in terms for place in term.code if not exists(root, place)]


def exists(root: Path, place: str) -> bool:
    path, _, name = place.partition(":")
    file = root / path
    return file.exists() and (not name or name in defined(ast.parse(file.read_text("utf-8")).body))


def defined(body: Sequence[ast.stmt]) -> set[str]:
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found
