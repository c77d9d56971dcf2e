"""Parses replies of Redis within the bounds that the command allows. No I/O.

A server that is not Redis may announce a list of a billion elements, or a value without an end. Each announced length
is checked against the reply's `ReplyBounds` before anything is stored. Only RESP2 is parsed, because no connection
switches to RESP3.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

LINE = 4096  # the most bytes of a status or an error
HEADER = 24  # the most bytes of a number, a length or a count: 64 bits have 19 digits and a sign
DEPTH = 5  # the most levels of nested lists; replies to XREAD have five
_END = b"\r\n"
_MOST = {ord("+"): LINE, ord("-"): LINE, ord(":"): HEADER, ord("$"): HEADER, ord("*"): HEADER}


class ReplyRefusedError(Exception):
    """The connection cannot be used afterwards."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    text: str


@dataclass(frozen=True, slots=True)
class ReplyBounds:
    elements: int = 1  # values and lists, nested ones included
    size: int = LINE  # bytes on the wire


class ReplyProgress(enum.Enum):
    WHOLE = enum.auto()  # `reply` is complete
    HUNGRY = enum.auto()  # more bytes are needed
    BUSY = enum.auto()  # `most` elements were parsed and the reply is not complete


class ReplyReader:
    """Holds at most the bytes of one shape and the bytes of one `feed`."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._at = 0  # index in `_data`; the bytes before were parsed
        self._searched = 0  # index in `_data`; no line ends before it
        self._shape = ReplyBounds()
        self._elements = self._size = 0  # of the current reply, so far
        self._length: int | None = None  # of the value whose bytes are incomplete
        self._open: list[tuple[list[object], int]] = []  # incomplete lists, outermost first, and their final lengths
        self.reply: object = None

    @property
    def buffered(self) -> int:
        return len(self._data) - self._at

    @property
    def elements(self) -> int:
        return self._elements

    @property
    def rest(self) -> bytes:
        return bytes(self._data[self._at :])

    def begin(self, shape: ReplyBounds) -> None:
        """Discards the previous reply. Keeps the unparsed bytes."""
        self._shape = shape
        self._elements = self._size = 0
        self._length = None
        self._open.clear()
        self.reply = None

    def feed(self, data: bytes) -> None:
        if self._at:
            del self._data[: self._at]
            self._searched -= self._at
            self._at = 0
        self._data += data

    def advance(self, most: int) -> ReplyProgress:
        for _ in range(most):
            if self._length is None:
                line = self._line()
                if line is None:
                    return ReplyProgress.HUNGRY
                whole = self._begun(line)
            else:
                whole = self._value(self._length)
            if whole is None:
                return ReplyProgress.HUNGRY
            if whole:
                return ReplyProgress.WHOLE
        return ReplyProgress.BUSY

    def _line(self) -> bytes | None:
        if not self.buffered:
            return None
        most = _MOST.get(self._data[self._at])
        if most is None:
            raise ReplyRefusedError("not a reply")
        start = max(self._at, self._searched)
        end = self._data.find(_END, start, self._at + most)
        if end < 0:
            if self.buffered >= most:
                raise ReplyRefusedError("a line that is too long")
            self._searched = max(start, len(self._data) - 1)
            return None
        line = bytes(self._data[self._at : end])
        self._at = self._searched = end + len(_END)
        self._spend(elements=1, size=len(line) + len(_END))
        return line

    def _begun(self, line: bytes) -> bool | None:
        """Whether the reply is now complete; None if the line's value is incomplete."""
        mark, rest = line[:1], line[1:]
        if mark == b"+":
            return self._add(rest)
        if mark == b"-":
            return self._add(ErrorReply(rest.decode("utf-8", "replace")))
        number = _number(rest)
        if mark == b":":
            return self._add(number)
        if number == -1:
            return self._add(None)
        if number < 0:
            raise ReplyRefusedError("less than nothing")
        if mark == b"$":
            self._spend(size=number + len(_END))
            return self._value(number)
        return self._list(number)

    def _list(self, count: int) -> bool:
        if count > self._shape.elements - self._elements:
            raise ReplyRefusedError("a longer list than was asked for")
        if count == 0:
            return self._add([])
        if len(self._open) == DEPTH:
            raise ReplyRefusedError("lists within lists")
        self._open.append(([], count))
        return False

    def _value(self, length: int) -> bool | None:
        end = self._at + length
        if len(self._data) < end + len(_END):
            self._length = length
            return None
        if self._data[end : end + len(_END)] != _END:
            raise ReplyRefusedError("a value without an end")
        value = bytes(memoryview(self._data)[self._at : end])
        self._at = self._searched = end + len(_END)
        self._length = None
        return self._add(value)

    def _add(self, value: object) -> bool:
        """Also closes the lists that the value completes. Whether the reply is complete."""
        while self._open:
            found, count = self._open[-1]
            found.append(value)
            if len(found) < count:
                return False
            value = found
            self._open.pop()
        self.reply = value
        return True

    def _spend(self, elements: int = 0, size: int = 0) -> None:
        self._elements += elements
        self._size += size
        if self._elements > self._shape.elements or self._size > self._shape.size:
            raise ReplyRefusedError("more than was asked for")


def _number(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit():
        raise ReplyRefusedError("not a number")
    return int(text)
