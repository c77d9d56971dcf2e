"""Finds, one character at a time, where a JSON value ends, or the first character that cannot belong to it."""

from __future__ import annotations

import enum

MAX_DEPTH = 64
_BLANK = " \t\n\r"
_HEX = frozenset("0123456789abcdefABCDEF")
_DIGITS = frozenset("0123456789")
_ESCAPES = frozenset('"\\/bfnrt')
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
# What may follow in a number, by what it is in: sign, 0, whole, point, fraction, e, sign of e, exponent.
_NUMBER = {
    "-": ("0", "1"), "0": (".", "e"), "1": ("1", ".", "e"), ".": ("2",), "2": ("2", "e"), "e": ("+", "3"), "+": ("3",),
    "3": ("3",),
}  # fmt: skip
_COMPLETE = frozenset("0123")


class JsonStep(enum.Enum):
    MORE = enum.auto()
    LAST = enum.auto()  # it ends the value
    BEYOND = enum.auto()  # the value has ended before it
    WRONG = enum.auto()


class JsonValue:
    """Blanks before the value are not part of it."""

    def __init__(self) -> None:
        self._open: list[str] = []  # brackets
        self._wants = "value"
        self._rest = ""  # of a literal
        self._hex = 0  # digits of an escape that are still to come
        self._number = ""

    def step(self, char: str) -> JsonStep:
        match self._wants:
            case "string" | "key-string":
                return self._string(char)
            case "escape":
                return self._escape(char)
            case "literal":
                return self._literal(char)
            case "number":
                return self._in_number(char)
        if char in _BLANK:
            return JsonStep.MORE
        return self._structure(char)

    def _structure(self, char: str) -> JsonStep:
        wants = self._wants
        if wants == "colon" and char == ":":
            self._wants = "value"
        elif wants in ("key", "key-or-end") and char == '"':
            self._wants = "key-string"
        elif wants == "comma-or-end" and char == ",":
            self._wants = "key" if self._open[-1] == "{" else "value"
        elif wants in ("key-or-end", "value-or-end", "comma-or-end") and char in "}]":
            return self._close(char)
        elif wants in ("value", "value-or-end"):
            return self._begin(char)
        else:
            return JsonStep.WRONG
        return JsonStep.MORE

    def _begin(self, char: str) -> JsonStep:
        if char in "{[":
            self._open.append(char)
            self._wants = "key-or-end" if char == "{" else "value-or-end"
            return JsonStep.MORE if len(self._open) <= MAX_DEPTH else JsonStep.WRONG
        if char == '"':
            self._wants = "string"
        elif char in _LITERALS:
            self._wants, self._rest = "literal", _LITERALS[char]
        elif char == "-" or char in _DIGITS:
            self._wants, self._number = "number", char if char in "-0" else "1"
        else:
            return JsonStep.WRONG
        return JsonStep.MORE

    def _close(self, char: str) -> JsonStep:
        if not self._open or self._open.pop() + char not in ("{}", "[]"):
            return JsonStep.WRONG
        return self._ended()

    def _ended(self) -> JsonStep:
        self._wants = "comma-or-end"
        return JsonStep.MORE if self._open else JsonStep.LAST

    def _string(self, char: str) -> JsonStep:
        if char == '"':
            if self._wants == "key-string":
                self._wants = "colon"
                return JsonStep.MORE
            return self._ended()
        if char == "\\":
            self._rest, self._wants = self._wants, "escape"
            return JsonStep.MORE
        return JsonStep.MORE if char >= " " and not "\ud800" <= char <= "\udfff" else JsonStep.WRONG

    def _escape(self, char: str) -> JsonStep:
        if self._hex:
            self._hex -= 1
            fine = char in _HEX
        else:
            fine = char in _ESCAPES or char == "u"
            self._hex = 4 if char == "u" else 0
        if not self._hex:
            self._wants = self._rest
        return JsonStep.MORE if fine else JsonStep.WRONG

    def _literal(self, char: str) -> JsonStep:
        if char != self._rest[0]:
            return JsonStep.WRONG
        self._rest = self._rest[1:]
        return JsonStep.MORE if self._rest else self._ended()

    def _in_number(self, char: str) -> JsonStep:
        for kind in _NUMBER[self._number]:
            if _is_kind(char, kind):
                self._number = kind
                return JsonStep.MORE
        if self._number not in _COMPLETE:
            return JsonStep.WRONG
        self._wants = "comma-or-end"
        return self.step(char) if self._open else JsonStep.BEYOND


def _is_kind(char: str, kind: str) -> bool:
    match kind:
        case "e":
            return char in "eE"
        case "+":
            return char in "+-"
        case "1" | "2" | "3":
            return char in _DIGITS and char != ""
        case _:
            return char == kind
