"""Conversations made from source text."""

from __future__ import annotations

import ast
import random

from hypothesis import given
from hypothesis import strategies as st

from models.train import chat

SOURCE = '''"""A module of birds.

They fly.
"""
import os
\x0c
class Bird:
    """One bird."""

    @property
    @other(
        1)
    def wings(self, count=2, *more):
        """Wings it has."""
        if count:

            return count

    def _hidden(self):
        return os


def fly(bird):
    """Make the bird fly."""
    return bird.wings
'''


def answers(source: str, name: str = "zoo/bird.py") -> dict[str, str]:
    found: dict[str, str] = {}
    for conversation in chat.about_module(name, source):
        turns = [message for message in conversation if message.role != "system"]
        found.update({ask.content: say.content for ask, say in zip(turns[::2], turns[1::2], strict=True)})
    return found


def test_speaks_of_the_module_and_what_it_defines() -> None:
    said = answers(SOURCE).values()
    assert "A module of birds.\n\nThey fly." in said
    assert "`zoo.bird` defines `Bird`, `fly`." in said
    assert "Make the bird fly." in said


def test_package_is_named_without_init() -> None:
    assert any("`zoo` defines" in say for say in answers(SOURCE, "zoo/__init__.py").values())


def test_code_is_whole_and_at_the_margin() -> None:
    bird = ast.parse(SOURCE).body[2]
    assert isinstance(bird, ast.ClassDef)
    wings = bird.body[1]
    assert isinstance(wings, ast.FunctionDef)
    code = chat.source_of(wings, SOURCE.split("\n"))
    assert code.startswith("@property\n@other(\n    1)\ndef wings(self, count=2, *more):\n")
    assert code.endswith("    if count:\n\n        return count")
    ast.parse(code)


def test_every_code_answer_parses() -> None:
    blocks = [say for say in answers(SOURCE * 3).values() if say.startswith("```")]
    assert blocks
    for block in blocks:
        ast.parse(block.removeprefix("```python\n").removesuffix("\n```"))


def test_is_the_same_every_time() -> None:
    assert list(chat.about_module("a.py", SOURCE)) == list(chat.about_module("a.py", SOURCE))


def test_text_that_is_no_python_says_nothing() -> None:
    assert list(chat.about_module("a.py", "print 'old'")) == []


@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"])), max_size=8))
def test_prose_keeps_whole_paragraphs_within_bounds(paragraphs: list[str]) -> None:
    kept = chat.prose("\n\n".join(paragraphs))
    assert len(kept) <= chat.MAX_ANSWER + 2 * len(paragraphs)
    assert kept == kept.strip()


def test_prose_drops_a_paragraph_too_long() -> None:
    assert chat.prose("short\n\n" + "x" * chat.MAX_ANSWER + "\n\nlast") == "short"
    assert chat.prose("x" * (chat.MAX_ANSWER + 1)) == ""


def test_about_itself_covers_every_question_and_alternates() -> None:
    conversations = list(chat.about_itself())
    asked = {message.content for turns in conversations for message in turns if message.role == "user"}
    assert asked == {question for questions, _ in chat.ITSELF for question in questions}
    for turns in conversations:
        roles = [message.role for message in turns if message.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert len(roles) // 2 <= chat.MAX_TURNS


def test_topics_without_a_short_paragraph_are_left_out() -> None:
    spoken = list(chat.about_topics({"lambda": "Small functions.", "wall": "x" * 2000}))
    assert [message.content for turns in spoken for message in turns if message.role == "assistant"] == [
        "Small functions."
    ]


def test_order_depends_on_the_name_alone() -> None:
    random.seed(1)
    first = list(chat.about_module("a.py", SOURCE))
    random.seed(2)
    assert list(chat.about_module("a.py", SOURCE)) == first
