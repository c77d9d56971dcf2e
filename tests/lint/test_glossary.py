"""The glossary names what the code has, and every executor."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts.figures import ROOT
from scripts.reference_glossary import Term, defined, exists, lacking, read_glossary

TERM = "terms:\n- {{word: {one}, meaning: m, code: []}}\n- {{word: {other}, meaning: m, code: []}}\nretired: []\n"


def test_the_code_has_what_the_glossary_names() -> None:
    assert lacking(ROOT, read_glossary(ROOT).terms) == [], "mend docs/glossary.yaml, then `make docs`"


def test_it_names_every_executor() -> None:
    """As the router has them, read as text."""
    tree = ast.parse((ROOT / "engine" / "execution" / "router.py").read_text("utf-8"))
    (executor,) = (term for term in read_glossary(ROOT).terms if term.word == "executor")
    (role,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Role")
    names = [
        node.value.value
        for node in role.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    assert len(names) > 4
    assert [name for name in names if f"`{name}`" not in executor.meaning] == []


@pytest.mark.parametrize(
    "place",
    [
        "engine/nowhere",
        "engine/scheduling/plan.py:Nothing",
        "service/core/admission/admission.py:admit",  # a method is no name of the module
    ],
)
def test_what_is_not_there_is_found(place: str) -> None:
    assert not exists(ROOT, place)
    assert lacking(ROOT, [Term("word", "", (place,))]) == [f"word: {place}"]


@pytest.mark.parametrize("place", ["engine/kernels", "engine/scheduling/plan.py", "engine/scheduling/plan.py:Row"])
def test_what_is_there_passes(place: str) -> None:
    assert exists(ROOT, place)


@pytest.mark.parametrize(("one", "other"), [("a", "a"), ("b", "a")])
def test_words_stand_once_and_in_order(one: str, other: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "glossary.yaml").write_text(TERM.format(one=one, other=other))
    with pytest.raises(ValueError, match="alphabetical"):
        read_glossary(tmp_path)


def test_names_of_a_module_are_classes_functions_and_constants() -> None:
    assert defined(ast.parse("class A: ...\ndef b(): ...\nC = 1\nD: int = 2\nimport e\n").body) == {"A", "b", "C", "D"}
