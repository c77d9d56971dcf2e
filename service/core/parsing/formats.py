"""Chooses the formats of a model's answers by its template and tokens, or by the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from service.config.settings import ChatSettings
from service.core.parsing.answer import AnswerParser
from service.core.parsing.calls import ARGS, CALL_ID, CallFormat, CallParser
from service.core.parsing.reasoning import ReasoningSplitter

HERMES = CallFormat("hermes", "<tool_call>", closes="</tool_call>")
LLAMA = CallFormat("llama", "<|python_tag|>", first=True, separator=";")
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", listed=True, named=True)
CALL_FORMATS = {form.name: form for form in (HERMES, LLAMA, MISTRAL)}
_OTHERS = {"[ARGS]": ARGS, "[CALL_ID]": CALL_ID}
_OPENS, _BEGINS, _ENDS = "\ud812", "\ud813", "\ud814"
_TAIL = 8  # ids of a prompt in which reasoning may have begun


class Vocabulary(Protocol):
    @property
    def added(self) -> Mapping[str, int]:
        pass

    @property
    def special(self) -> frozenset[int]:
        pass

    @property
    def template_source(self) -> str: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Markers as tokens spell them, and as they stand in the parsed text."""

    begin: str
    end: str
    begin_mark: str
    end_mark: str


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    marks: Mapping[int, str] = field(default_factory=dict)  # tokens whose text is in no answer: what stands for them

    def parser(self, tools: bool, continues: bool, prompt_tail: str) -> AnswerParser | None:
        """None where an answer to a prompt that ends with `prompt_tail` has nothing to parse."""
        calls = self.calls if tools else None
        form = self.reasoning
        inside = form is not None and prompt_tail.rstrip().endswith(form.begin_mark)
        splits = form is not None and (inside or not continues)
        if calls is None and not splits:
            return None
        return AnswerParser(
            ReasoningSplitter(form.begin_mark, form.end_mark, inside) if form is not None and splits else None,
            None if calls is None else CallParser(calls, not continues),
        )


NO_FORMATS = AnswerFormats()


def prompt_tail(formats: AnswerFormats, vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """Returns a prompt's end as parsers see it: a token without text counts where it is a marker, and elsewhere ends
    what was before."""
    tail: list[str] = []
    for token_id in ids[-_TAIL:]:
        if token_id in formats.marks:
            tail.append(formats.marks[token_id])
        else:
            tail.append("\0" if token_id in vocabulary.special else vocabulary.decode([token_id]))
    return "".join(tail)


def choose(settings: ChatSettings, vocabulary: Vocabulary) -> AnswerFormats:
    calls = _call_format(settings.tool_format, vocabulary)
    reasoning = _reasoning_format(settings.reasoning_format, vocabulary)
    marks: dict[int, str] = {}

    def marked(text: str, mark: str) -> str:
        token_id = vocabulary.added.get(text)
        if token_id is None or token_id not in vocabulary.special:
            return text
        marks[token_id] = mark
        return mark

    if calls is not None:
        calls = replace(calls, opens=marked(calls.opens, _OPENS))
        if calls.named:
            for text, mark in _OTHERS.items():
                marked(text, mark)
    if reasoning is not None:
        begin, end = marked(reasoning.begin, _BEGINS), marked(reasoning.end, _ENDS)
        reasoning = replace(reasoning, begin_mark=begin, end_mark=end)
    return AnswerFormats(calls, reasoning, marks)


def _call_format(name: str, vocabulary: Vocabulary) -> CallFormat | None:
    if name != "auto":
        return CALL_FORMATS.get(name)
    source = vocabulary.template_source
    if HERMES.opens in source:  # with <function=…> in it, calls are no JSON
        return None if "<function=" in source else HERMES
    for form in (MISTRAL, LLAMA):
        if form.opens in source or form.opens in vocabulary.added:
            return form
    return None


def _reasoning_format(name: str, vocabulary: Vocabulary) -> ReasoningFormat | None:
    pairs = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
    for begin, end in pairs:
        if name == "auto" and begin in vocabulary.added and end in vocabulary.added:
            return ReasoningFormat(begin, end, begin, end)
    return ReasoningFormat(*pairs[0], *pairs[0]) if name == "think" else None
