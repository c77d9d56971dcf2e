"""Parses one answer into reasoning, calls and text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

_MARKERS = dict.fromkeys(range(0xD800, 0xE000))  # half characters, which stand for tokens
MAX_HELD = 65_536  # characters that may wait until it is known what they are; more are text


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The name and id come with a call's first piece."""

    index: int  # of the call in the answer
    id: str
    name: str
    arguments: str  # JSON, as the model writes it


class Parsed(NamedTuple):
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class TextStage(Protocol):
    def feed(self, text: str) -> Parsed: ...

    def end(self) -> Parsed: ...


class ReasoningStage(Protocol):
    def feed(self, text: str) -> tuple[str, str]:
        pass

    def end(self) -> tuple[str, str]: ...


class AnswerParser:
    def __init__(self, reasoning: ReasoningStage | None, calls: TextStage | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def feed(self, text: str) -> Parsed:
        thought = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.feed(text)
        if self._calls is None:
            return _flagged(Parsed(text, thought))
        return _flagged(self._calls.feed(text)._replace(reasoning=thought))

    def end(self) -> Parsed:
        """Returns what was withheld. Call it once."""
        thought, text = self._reasoning.end() if self._reasoning is not None else ("", "")
        if self._calls is None:
            return _flagged(Parsed(text, thought))
        first, last = self._calls.feed(text), self._calls.end()
        return _flagged(Parsed(first.text + last.text, thought, first.calls + last.calls))


def _flagged(found: Parsed) -> Parsed:
    if found.text.isascii() and found.reasoning.isascii():
        return found
    return found._replace(text=found.text.translate(_MARKERS), reasoning=found.reasoning.translate(_MARKERS))


def whole_calls(deltas: Iterable[CallDelta]) -> list[CallDelta]:
    whole: list[CallDelta] = []
    for delta in deltas:
        if delta.index == len(whole):
            whole.append(delta)
        else:
            call = whole[delta.index]
            whole[delta.index] = replace(call, arguments=call.arguments + delta.arguments)
    return whole


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """Returns how many characters at the end may begin a marker."""
    most = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), most, -1):
            if text.endswith(marker[:size]):
                most = size
                break
    return most
