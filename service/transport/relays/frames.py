"""Defines the messages between the front and a relay: msgpack, each behind its length.

The relay numbers a call and reports it; the front orders reads and writes and ends it. Either side may be ahead, so
both ignore messages about a call that they no longer know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from service.transport.call.http2 import Identification, PortBounds

_HEADER = 8  # bytes of a length
Pairs = list[tuple[str, Any]]  # text, or bytes where the name ends in -bin


class CallStarted(msgspec.Struct, array_like=True, tag=0):
    call: int
    method: str
    metadata: Pairs
    peer: str
    names: dict[str, list[bytes]]  # that the certificate of its connection has
    deadline: float | None  # on the clock of time.monotonic, which all processes share


class Message(msgspec.Struct, array_like=True, tag=1):
    """Result of a read; None: the caller has sent its last message."""

    call: int
    data: bytes | None


class WriteAccepted(msgspec.Struct, array_like=True, tag=2):
    call: int


class CallEnded(msgspec.Struct, array_like=True, tag=3):
    """The call has ended before the front ended it."""

    call: int
    late: bool  # since its deadline has passed


class Listening(msgspec.Struct, array_like=True, tag=4):
    port: int  # 0: it cannot


class TurnedAway(msgspec.Struct, array_like=True, tag=5):
    """Counts further calls refused because the front was too far behind."""

    calls: int


class Stopped(msgspec.Struct, array_like=True, tag=6):
    """The relay's server has stopped, without a call left."""


class Alive(msgspec.Struct, array_like=True, tag=7):
    pass


class Listen(msgspec.Struct, array_like=True, tag=0):
    address: str
    bounds: PortBounds
    identification: Identification | None  # None: plaintext
    hang_timeout: float  # seconds without a message after which either end considers the other hung
    refusals: list[CallRefusal]  # one of them is for whoever comes while the front is too far behind


class CallRefusal(msgspec.Struct, array_like=True):
    code: int
    details: str
    trailers: Pairs


class UseIdentification(msgspec.Struct, array_like=True, tag=1):
    identification: Identification


class Read(msgspec.Struct, array_like=True, tag=2):
    call: int


class Head(msgspec.Struct, array_like=True, tag=3):
    call: int
    metadata: Pairs


class WriteMessage(msgspec.Struct, array_like=True, tag=4):
    call: int
    data: bytes


class FinishCall(msgspec.Struct, array_like=True, tag=5):
    """Ends a call well, after one more message unless that is None."""

    call: int
    data: bytes | None


class Abort(msgspec.Struct, array_like=True, tag=6):
    call: int
    refusal: CallRefusal


class Stop(msgspec.Struct, array_like=True, tag=7):
    """Sends GOAWAY, accepts no more connections, and gives calls `grace` seconds; None: no limit. May be repeated."""

    grace: float | None


class PingRelay(msgspec.Struct, array_like=True, tag=8):
    """Asks for Alive, and proves that the front is not hung."""


Report = CallStarted | Message | WriteAccepted | CallEnded | Listening | TurnedAway | Stopped | Alive  # relay → front
Order = Listen | UseIdentification | Read | Head | WriteMessage | FinishCall | Abort | Stop | PingRelay  # front → relay

_Received = TypeVar("_Received")
_encoder = msgspec.msgpack.Encoder()


class RelayLink(asyncio.Protocol, Generic[_Received]):
    """One end of the socket. Messages of the other end are trusted: it is our code."""

    def __init__(self, kind: object, receive: Callable[[_Received], None], lost: Callable[[], None]) -> None:
        """`kind`: what it receives, Report or Order. `lost` is called once, when the other end has gone."""
        self._decoder: msgspec.msgpack.Decoder[_Received] = msgspec.msgpack.Decoder(cast(type[_Received], kind))
        self._receive = receive
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._rest = bytearray()  # begins with a message that has not come whole
        self._unsent = bytearray()

    def send(self, message: Report | Order) -> None:
        """Sends all messages of this turn of the event loop together."""
        unsent = self._unsent
        if not unsent:
            self._loop.call_soon(self._flush)
        start = len(unsent)
        unsent += bytes(_HEADER)
        try:
            _encoder.encode_into(message, unsent, -1)
        except BaseException:
            del unsent[start:]
            raise
        unsent[start : start + _HEADER] = (len(unsent) - start - _HEADER).to_bytes(_HEADER, "big")

    def close(self) -> None:
        """Closes once what was sent has left."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._rest += data
            if _end(self._rest, 0) > len(self._rest):
                return
            data = bytes(self._rest)
            self._rest.clear()
        start, view = 0, memoryview(data)
        while (end := _end(data, start)) <= len(data):
            self._receive(self._decoder.decode(view[start + _HEADER : end]))
            start = end
        self._rest += view[start:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def _flush(self) -> None:
        if self._unsent and self._transport is not None:
            self._transport.write(self._unsent)
        self._unsent = bytearray()


def _end(data: bytes | bytearray, start: int) -> int:
    """Returns where the message at `start` ends; beyond the data where its length is incomplete."""
    if len(data) - start < _HEADER:
        return len(data) + _HEADER
    return start + _HEADER + int.from_bytes(data[start : start + _HEADER], "big")
