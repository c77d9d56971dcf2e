"""Represents one relay's calls in the front, where handlers take them for gRPC's own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple, NoReturn, cast

import grpc

from service.transport.call.context import Context, Metadata, Trailers
from service.transport.call.errors import forget_frames
from service.transport.relays.frames import (
    Abort,
    CallEnded,
    CallRefusal,
    CallStarted,
    FinishCall,
    Head,
    Message,
    Order,
    Read,
    RelayLink,
    Report,
    WriteAccepted,
    WriteMessage,
)

# A method's: of its requests, which it reads itself, and its call.
Body = Callable[[object, Context], Awaitable[bytes | None]]
_UNKNOWN = CallRefusal(grpc.StatusCode.UNKNOWN.value[0], "", [])
_log = logging.getLogger(__name__)


class RelayedCallDetails(NamedTuple):
    """Has the fields of grpc.HandlerCallDetails."""

    method: str
    invocation_metadata: Metadata


class RelayedCall:
    """Has ended once the front has ended it, or the caller has gone."""

    def __init__(self, came: CallStarted, send: Callable[[Order], None]) -> None:
        self._came = came
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._read: asyncio.Future[object] | None = None
        self._write: asyncio.Future[None] | None = None
        self._code: grpc.StatusCode | None = None
        self._late = False
        self.ended = False

    def peer(self) -> str:
        return self._came.peer

    def invocation_metadata(self) -> Metadata:
        return self._came.metadata

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return self._came.names

    def time_remaining(self) -> float | None:
        if self._late:
            return 0.0
        deadline = self._came.deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def code(self) -> grpc.StatusCode | None:
        return self._code

    async def read(self) -> object:
        if self.ended:
            return None
        self._read = self._loop.create_future()
        self._send(Read(self._came.call))
        try:
            return await self._read
        finally:
            self._read = None  # it holds the message

    async def write(self, message: bytes) -> None:
        self._check()
        self._write = self._loop.create_future()
        self._send(WriteMessage(self._came.call, message))
        await self._write

    async def send_initial_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._check()
        self._send(Head(self._came.call, list(metadata)))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailers: Trailers = ()) -> NoReturn:
        self._check()
        self._code = code
        self.end(Abort(self._came.call, CallRefusal(code.value[0], details, list(trailers))))
        raise grpc.aio.AbortError

    def answer(self, response: bytes | None) -> None:
        self.end(FinishCall(self._came.call, response))

    def end(self, order: FinishCall | Abort) -> None:
        if not self.ended:
            self._send(order)
            self._close()

    def came(self, data: bytes | None) -> None:
        """Takes a read message; None: there is no more."""
        if self._read is not None and not self._read.done():
            self._read.set_result(data)

    def taken(self) -> None:
        if self._write is not None and not self._write.done():
            self._write.set_result(None)

    def gone(self, late: bool) -> None:
        """The caller or, if `late`, the deadline has ended the call."""
        self._late = late
        self._close()

    def _close(self) -> None:
        """Wakes what still waits to read or write, which nothing else may cancel."""
        self.ended = True
        self.came(None)
        self.taken()

    def _check(self) -> None:
        if self.ended:
            raise grpc.aio.InternalError("the call has ended")


class RelayedCalls:
    def __init__(self, handlers: grpc.GenericRpcHandler[bytes, bytes]) -> None:
        self._handlers = handlers
        self._calls: dict[int, tuple[RelayedCall, asyncio.Task[None]]] = {}
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, came: CallStarted, link: RelayLink[Report]) -> None:
        call = RelayedCall(came, link.send)
        found = self._handlers.service(cast(grpc.HandlerCallDetails, RelayedCallDetails(came.method, came.metadata)))
        assert found is not None, "a port has a handler for what it does not know"
        body = cast(Body, found.stream_stream if found.response_streaming else found.stream_unary)
        task = self._loop.create_task(self._handle(came.call, call, body))
        self._calls[came.call] = call, task
        # Not by the task itself: one that is cancelled before its first turn runs no `finally`.
        task.add_done_callback(lambda _: self._calls.pop(came.call))

    def on(self, report: Message | WriteAccepted | CallEnded) -> None:
        """Ignores a report to a call that has ended."""
        found = self._calls.get(report.call)
        if found is None:
            return
        call, task = found
        match report:
            case Message(data=data):
                call.came(data)
            case WriteAccepted():
                call.taken()
            case CallEnded(late=late):
                call.gone(late)
                task.cancel()

    def lose(self) -> None:
        for call, task in self._calls.values():
            call.gone(late=False)
            task.cancel()

    async def _handle(self, number: int, call: RelayedCall, body: Body) -> None:
        try:
            call.answer(await body(None, call))
        except grpc.aio.AbortError as aborted:
            self._loop.call_soon(forget_frames, aborted)
        except asyncio.CancelledError:
            call.end(Abort(number, _UNKNOWN))  # unless that is why: a handler that gave up
        except Exception as error:
            # As gRPC would. Its text may be anything.
            _log.error("a handler raised %s", type(error).__name__)
            call.end(Abort(number, _UNKNOWN))
