"""What travels between the engine loop and the processes that follow grammars. Frames are a length and msgpack."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")
_HEAD = struct.Struct("!I")


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A sequence begins, or is taken up behind `ids` of its answer. The grammar is compiled unless it is known."""

    key: int
    grammar: str
    ids: tuple[int, ...]
    stops: tuple[int, ...]


class Advance(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The answer goes on. `force`: what the grammar leaves no choice about is taken as said."""

    key: int
    ids: tuple[int, ...]
    force: bool


class LookAhead(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Masks behind each of these tokens are wanted, which were not said."""

    key: int
    draft: tuple[int, ...]


class TakeBack(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The last so many tokens were not said."""

    key: int
    count: int


class End(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The sequence has gone."""

    key: int


class Followed(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First answer to Advance; `Masked` follows."""

    key: int
    allowed: bool
    forced: tuple[int, ...]
    over: bool  # nothing may follow, and the answer is whole


class Masked(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Last answer to Begin, Advance and TakeBack."""

    key: int
    length: int  # tokens of the answer before it
    mask: bytes  # a bit for each token, from the lowest bit of the first byte on; stop tokens where the answer may end
    whole: bool  # the answer may end here
    used: int  # bytes of all grammars of this process


class MaskedAhead(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Answer to LookAhead. Empty behind what may not come, or ends the answer."""

    key: int
    length: int
    draft: tuple[int, ...]
    masks: tuple[bytes, ...]
    used: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The sequence goes on no more. Last answer to any command, or none's where another sequence was at fault."""

    key: int
    reason: str  # one of `Reason`
    used: int
    answers: bool  # a command, not only news


class Gone(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Answer to End, and to what came for a sequence that has failed."""

    key: int
    used: int


class Configure(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First to the fork server."""

    folder: str  # of the model; empty: tokens are bytes
    compiling: float
    masking: float
    of_constraint: int
    of_caller: int


class Fork(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A process, please; its socket comes beside this. Numbers are never used again."""

    number: int


class Kill(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """`Ended` follows."""

    number: int


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The vocabulary is there."""

    mask_bytes: int


class Unloadable(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """There can be no constraints with this model."""

    message: str


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A process has gone."""

    number: int
    code: int  # exit code, or minus the signal


Command = Begin | Advance | LookAhead | TakeBack | End
Answer = Followed | Masked | MaskedAhead | Failed | Gone
Order = Configure | Fork | Kill
News = Loaded | Unloadable | Ended

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_news = msgspec.msgpack.Decoder(News).decode


def frame(message: Command | Answer) -> bytes:
    data = encode(message)
    return _HEAD.pack(len(data)) + data


class Frames(Generic[T]):
    """Cuts a stream of bytes into messages."""

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """Those that are whole now."""
        self._data += data
        at = 0
        while len(self._data) - at >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._data, at)
            if len(self._data) - at < _HEAD.size + size:
                break
            begin = at + _HEAD.size
            at = begin + size
            yield self._decode(memoryview(self._data)[begin:at].tobytes())
        del self._data[:at]
