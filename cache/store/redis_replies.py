"""Replies of Redis, taken apart within the bounds that the command allows. No I/O.

Whoever answers in Redis's place may announce a list of a thousand million, or a value without an end. What is announced
is compared with what was asked for before any of it is kept, so that a reply costs no more memory than its `Shape` and
no more time at once than a few hundred elements. RESP2 alone: the types of RESP3 are never asked for.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

LINE = 4096  # bytes of a status or an error
HEADER = 24  # bytes of a number, a length or a count: 64 bits have 19 digits and a sign
DEPTH = 5  # of lists within one another: XREAD has so many
_END = b"\r\n"
_MOST = {ord("+"): LINE, ord("-"): LINE, ord(":"): HEADER, ord("$"): HEADER, ord("*"): HEADER}


class ReplyRefusedError(Exception):
    """More than the command may answer, or bytes that are not RESP2. The connection is useless."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """What Redis says where a command failed. A reply as any other, also within a list."""

    text: str


@dataclass(frozen=True, slots=True)
class Shape:
    """The most that one reply may be."""

    elements: int = 1  # values and lists, those within lists included
    size: int = LINE  # bytes as they are sent


class Progress(enum.Enum):
    """How far `ReplyReader.advance` came."""

    WHOLE = enum.auto()  # `reply` is there
    HUNGRY = enum.auto()  # more bytes are needed
    BUSY = enum.auto()  # it took apart as much as it was allowed to


class ReplyReader:
    """Takes one reply apart after another. It keeps at most the bytes of one shape and those fed at once."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._at = 0  # what lies before was taken apart
        self._searched = 0  # no line ends before
        self._shape = Shape()
        self._elements = self._size = 0  # of this reply so far
        self._length: int | None = None  # of the value that is being waited for
        self._open: list[tuple[list[object], int]] = []  # lists that lack elements, and how many each will have
        self.reply: object = None

    @property
    def buffered(self) -> int:
        """Bytes that were fed and not taken apart."""
        return len(self._data) - self._at

    @property
    def elements(self) -> int:
        """Of the present reply, taken apart so far."""
        return self._elements

    @property
    def rest(self) -> bytes:
        """What was fed and not taken apart."""
        return bytes(self._data[self._at :])

    def begin(self, shape: Shape) -> None:
        """The next reply may be of this shape."""
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

    def advance(self, most: int) -> Progress:
        """Takes apart up to `most` elements. Raises ReplyRefusedError."""
        for _ in range(most):
            if self._length is None:
                line = self._line()
                if line is None:
                    return Progress.HUNGRY
                whole = self._begun(line)
            else:
                whole = self._value(self._length)
            if whole is None:
                return Progress.HUNGRY
            if whole:
                return Progress.WHOLE
        return Progress.BUSY

    def _line(self) -> bytes | None:
        """The next line with its end; None where it is not all there."""
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
        """Whether the reply is whole with this line; None where a value has begun and is not all there."""
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
        """Puts a value where it belongs. Whether the reply is whole."""
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
