"""Finds tool calls in an answer's text.

A call is emitted from its first argument on; before that, what turns out to be no call is text. Where JSON becomes
invalid later, the call ends, and text follows.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from service.core.parsing.answer import MAX_HELD, CallDelta, Parsed, held_back
from service.core.parsing.call_object import CallObject
from service.core.parsing.json_text import JsonStep, JsonValue

_BLANK = " \t\n\r"
_LONGEST_NAME = 256  # characters
ARGS, CALL_ID = "\ud810", "\ud811"  # markers that are tokens stand in the text as what text never has: half characters


@dataclass(frozen=True, slots=True)
class CallFormat:
    name: str
    opens: str  # what is before a call, or before all of them
    closes: str = ""  # what is behind each
    first: bool = False  # an answer may begin with a call, without `opens`
    listed: bool = False  # as a JSON list
    separator: str = ""  # between calls without `opens`
    named: bool = False  # the name before the arguments, in no JSON


def new_id() -> str:
    """Nine letters and digits, which the strictest template requires."""
    return secrets.token_hex(5)[:9]


class CallParser:
    def __init__(self, form: CallFormat, begins: bool, make_id: Callable[[], str] = new_id) -> None:
        """`begins`: the text starts an answer."""
        self._form = form
        self._make_id = make_id
        self._read = self._first if form.first and begins else self._text
        self._marker = (form.opens,)
        self._held: list[str] = []  # since there was only text; it is text again where no call comes of it
        self._size = 0  # of it
        self._mark = ""  # what is held behind a call, without blanks before it
        self._object = CallObject()
        self._value: JsonValue | None = None  # arguments that stand alone
        self._begun = False  # a call was given out, and goes on
        self._closed = False  # there was what is behind each
        self._listed = False
        self._count = 0  # calls
        self._plain: list[str] = []
        self._calls: list[CallDelta] = []

    def feed(self, text: str) -> Parsed:
        at = 0
        while at < len(text):
            if self._read == self._text:
                at = self._text_until_marker(text, at)
            elif self._read(text[at]):
                at += 1
        return self._taken()

    def end(self) -> Parsed:
        if self._read == self._text or not self._blank():
            self._revert()
        self._held.clear()
        return self._taken()

    def _taken(self) -> Parsed:
        self._give()
        found = Parsed("".join(self._plain), "", tuple(self._calls))
        self._plain, self._calls = [], []
        return found

    # Each of these reads a character, and says whether it has taken it; else another is to look at it.

    def _text(self, char: str) -> bool:
        raise AssertionError("is read in larger pieces")

    def _text_until_marker(self, text: str, at: int) -> int:
        opens, end, before = self._form.opens, len(text), 0
        if self._held:  # the beginning of a marker
            held = "".join(self._held)
            text, at, before = held + text[at:], 0, at - len(held)
            self._held.clear()
        found = text.find(opens, at)
        if found >= 0:
            self._plain.append(text[at:found])
            self._read = self._opened
            self._hold(opens)
            return before + found + len(opens)
        kept = len(text) - held_back(text[at:], self._marker)
        self._plain.append(text[at:kept])
        if kept < len(text):
            self._held.append(text[kept:])
        return end

    def _first(self, char: str) -> bool:
        if char in _BLANK:
            return self._hold(char)
        if char == "{":
            return self._begin_object()
        return self._back()

    def _opened(self, char: str) -> bool:
        if char in _BLANK:
            return self._hold(char)
        if char == "{":
            return self._begin_object()
        if char == "[" and self._form.listed and not self._listed:
            self._listed = True
            return self._hold(char)
        if self._form.named and not self._listed and _may_name(char):
            self._object, self._read = CallObject(), self._name
            return False
        return self._back()

    def _name(self, char: str) -> bool:
        if _may_name(char) and len(self._object.name) < _LONGEST_NAME:
            self._object.name += char
            return self._hold(char)
        self._read = self._id if char == CALL_ID else self._named
        return self._hold(char) if char == CALL_ID else self._named(char)

    def _id(self, char: str) -> bool:
        """Skips the model's own id; callers get one of ours."""
        if char.isalnum():
            return self._hold(char)
        self._read = self._named
        return self._named(char)

    def _named(self, char: str) -> bool:
        if char in (ARGS, *_BLANK):
            return self._hold(char)
        if char != "{":
            return self._back()
        self._value, self._read = JsonValue(), self._arguments
        self._begin_call()
        return False

    def _arguments(self, char: str) -> bool:
        assert self._value is not None
        step = self._value.step(char)
        if step is JsonStep.WRONG:
            return self._back()
        self._object.arguments.append(char)
        if step is JsonStep.LAST:
            self._over()
        return True

    def _in_object(self, char: str) -> bool:
        call = self._object
        known = len(call.arguments)
        step = call.step(char)
        if step is JsonStep.WRONG:
            return self._back()
        if call.begun and not self._begun:
            self._begin_call()
        elif not self._begun or len(call.arguments) == known:
            self._hold(char)
        if step is JsonStep.LAST:
            self._over()
        return True

    def _between(self, char: str) -> bool:
        form = self._form
        if self._listed:
            if char == ",":
                self._read = self._opened
            elif char == "]":
                self._listed = False
                return self._drop()
            elif char not in _BLANK:
                return self._back()
            return self._hold(char)
        if char in _BLANK and not self._mark:
            return self._hold(char)
        mark = self._mark + char
        if not self._closed and mark == form.closes:
            self._closed = True
            return self._drop()
        if mark in (form.separator, form.opens):
            self._read = self._opened
            return self._hold(char)
        if form.opens.startswith(mark) or (not self._closed and form.closes.startswith(mark)):
            self._mark = mark
            return self._hold(char)
        return self._back()

    def _begin_object(self) -> bool:
        self._object, self._read = CallObject(), self._in_object
        return False

    def _begin_call(self) -> None:
        self._drop()
        self._calls.append(CallDelta(self._count, self._make_id(), self._object.name, ""))
        self._count += 1
        self._begun = True

    def _over(self) -> None:
        self._give()
        self._drop()
        self._begun = self._closed = False
        self._read = self._between

    def _give(self) -> None:
        arguments = self._object.arguments
        if not self._begun or not arguments:
            return
        more = "".join(arguments)
        arguments.clear()
        if self._calls and self._calls[-1].index == self._count - 1:
            last = self._calls.pop()
            self._calls.append(replace(last, arguments=last.arguments + more))
        else:
            self._calls.append(CallDelta(self._count - 1, "", "", more))

    def _hold(self, text: str) -> bool:
        self._held.append(text)
        self._size += len(text)
        if self._size > MAX_HELD:
            self._revert()
        return True

    def _back(self) -> bool:
        self._revert()
        return False

    def _revert(self) -> None:
        self._give()
        self._plain.extend(self._held)
        self._drop()
        self._begun = self._listed = False
        self._read = self._text

    def _drop(self) -> bool:
        self._held.clear()
        self._size, self._mark = 0, ""
        return True

    def _blank(self) -> bool:
        return self._read == self._between and not "".join(self._held).strip()


def _may_name(char: str) -> bool:
    return char.isalnum() or char in "_-."
