"""Runs one relay: `python -m service.transport.relays.process --fd N …`, with the front at the other end of the socket
N."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import random
import signal
import socket
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import uvloop

from service.observability import logs
from service.transport.call import http2
from service.transport.call.busy import BusyPeers
from service.transport.call.errors import forget_frames
from service.transport.port.evictor import Evictor
from service.transport.process.garbage import Garbage
from service.transport.process.heap import Heap
from service.transport.process.silence import silence
from service.transport.relays.frames import (
    Abort,
    Alive,
    CallEnded,
    CallRefusal,
    CallStarted,
    FinishCall,
    Head,
    Listen,
    Listening,
    Message,
    Order,
    PingRelay,
    Read,
    RelayLink,
    Stop,
    Stopped,
    TurnedAway,
    UseIdentification,
    WriteAccepted,
    WriteMessage,
)
from service.transport.relays.life import SignsOfLife

_MOST_UNHEARD = 1024  # calls that the front has not answered yet; each costs some ten KiB, and its caller waits
_OOM_SCORE = 200  # above the front's; the engine process has 300
_OPEN = "/grpc."  # prefix of the methods of health and reflection, which need no token
_NAMES = ("peer_uri", "peer_dns", "peer_email")  # what a certificate may say of who calls
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_log = logging.getLogger(__name__)
_Context = grpc.aio.ServicerContext[bytes, bytes]
_OfCall = Read | Head | WriteMessage | FinishCall | Abort

if TYPE_CHECKING:  # it has no parameters while it runs
    _GenericHandler = grpc.GenericRpcHandler[bytes, bytes]
else:
    _GenericHandler = grpc.GenericRpcHandler


class _RelayCall:
    """Executes the front's orders to one gRPC call in sequence."""

    def __init__(self, number: int, context: _Context, link: RelayLink[Order], busy: BusyPeers | None) -> None:
        """`busy` counts the connection as busy from the first message on. None: the call needs no token, so it must not
        keep its connection."""
        self._number = number
        self._context = context
        self._link = link
        self._busy = busy
        self._peer: str | None = None  # the connection, once this call counts it as busy
        self._loop = asyncio.get_running_loop()
        self._orders = deque[_OfCall]()
        self._more: asyncio.Future[None] | None = None  # while it waits for orders
        self._reading: asyncio.Task[None] | None = None
        self._ended = False
        self.heard = False  # anything from the front

    def order(self, order: _OfCall) -> None:
        """A read is begun, and later orders do not wait for it."""
        if isinstance(order, Read):
            self._reading = self._loop.create_task(self._read())
            return
        self._orders.append(order)
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def serve(self) -> None:
        context = self._context
        while True:
            while not self._orders:
                self._more = self._loop.create_future()
                await self._more
            match self._orders.popleft():
                case WriteMessage(data=data):
                    await context.write(data)
                    self._link.send(WriteAccepted(self._number))
                case Head(metadata=metadata):
                    await context.send_initial_metadata(tuple(metadata))
                case FinishCall(data=data):
                    if data is not None:
                        await context.write(data)
                    return
                case Abort(refusal=refusal):
                    await abort(context, refusal)

    def end(self) -> None:
        """Ends the call's claim on its connection, which a read that returns later does not renew."""
        self._ended = True
        if self._busy is not None and self._peer is not None:
            self._busy.end(self._peer)

    async def _read(self) -> None:
        try:
            data = await self._context.read()
        except (grpc.aio.BaseError, asyncio.CancelledError):
            return  # it has ended, which the front learns otherwise
        if self._busy is not None and self._peer is None and isinstance(data, bytes) and not self._ended:
            self._peer = self._context.peer()
            self._busy.begin(self._peer)
        self._link.send(Message(self._number, data if isinstance(data, bytes) else None))


class RelayCalls(_GenericHandler):
    """Accepts calls of any method: only the front knows the methods."""

    def __init__(self, link: RelayLink[Order], verified: bool, refusals: list[CallRefusal]) -> None:
        """`verified`: connections have certificates."""
        self._link = link
        self._verified = verified
        self._refusals = refusals
        self._numbers = itertools.count()
        self._calls: dict[int, _RelayCall] = {}
        self._unheard = 0
        self.busy = BusyPeers()
        self._turned_away = 0  # that were not reported to the front yet

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        method = handler_call_details.method

        async def handle(_: object, context: _Context) -> None:
            await self._handle(method, context)

        return grpc.stream_stream_rpc_method_handler(handle)

    def __len__(self) -> int:
        return len(self._calls)

    def order(self, order: _OfCall) -> None:
        call = self._calls.get(order.call)
        if call is not None:
            if not call.heard:
                call.heard = True
                self._unheard -= 1
            call.order(order)

    async def _handle(self, method: str, context: _Context) -> None:
        if self._unheard >= _MOST_UNHEARD:
            self._turn_away()
            await abort(context, random.choice(self._refusals))
        number = next(self._numbers)
        call = self._calls[number] = _RelayCall(
            number, context, self._link, None if method.startswith(_OPEN) else self.busy
        )
        self._unheard += 1
        self._link.send(self._came(number, method, context))
        try:
            await call.serve()
        except (asyncio.CancelledError, grpc.aio.InternalError) as error:
            self._link.send(CallEnded(number, late=context.time_remaining() == 0))
            raise asyncio.CancelledError from error
        finally:
            call.end()
            del self._calls[number]
            self._unheard -= not call.heard

    def _came(self, number: int, method: str, context: _Context) -> CallStarted:
        remaining = context.time_remaining()
        names: dict[str, list[bytes]] = {}
        if self._verified:
            connection = context.auth_context()
            names = {key: list(connection[key]) for key in _NAMES if key in connection}
        return CallStarted(
            number,
            method,
            list(context.invocation_metadata() or ()),
            context.peer(),
            names,
            None if remaining is None else time.monotonic() + remaining,
        )

    def _turn_away(self) -> None:
        if not self._turned_away:
            asyncio.get_running_loop().call_later(0.1, self._tell)
        self._turned_away += 1

    def _tell(self) -> None:
        self._link.send(TurnedAway(self._turned_away))
        self._turned_away = 0


async def abort(context: _Context, refusal: CallRefusal) -> None:
    try:
        await context.abort(_CODES[refusal.code], refusal.details, tuple(refusal.trailers))
    except grpc.aio.AbortError as aborted:
        asyncio.get_running_loop().call_soon(forget_frames, aborted)
        raise


class Relay:
    def __init__(self) -> None:
        self.link: RelayLink[Order] = RelayLink(Order, self._receive, self._lost)
        self._server: grpc.aio.Server | None = None
        self._calls: RelayCalls | None = None
        self._identification: http2.Identification | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._life: SignsOfLife | None = None  # whether the front is alive; None until the relay listens

    def live(self) -> int:
        return 0 if self._calls is None else len(self._calls)

    def _receive(self, order: Order) -> None:
        if self._life is not None:
            self._life.heard()
        match order:
            case PingRelay():
                self.link.send(Alive())
            case Listen():
                self._begin(self._listen(order))
            case UseIdentification(identification=identification):
                self._identification = identification
            case Stop(grace=grace):
                self._begin(self._stop(grace))
            case _:
                assert self._calls is not None
                self._calls.order(order)

    def _begin(self, work: asyncio._CoroutineLike[None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, order: Listen) -> None:
        self._identification = order.identification
        self._calls = RelayCalls(self.link, order.identification is not None, order.refusals)
        server = grpc.aio.server(options=http2.options(order.bounds, shared=True))
        server.add_generic_rpc_handlers((self._calls,))
        identification = None if order.identification is None else http2.credentials(self._current)
        port = http2.bind(server, order.address, identification)
        if port:
            evictor = Evictor()
            evictor.watch(port, order.bounds, self._calls.busy)
            evictor.start()
            await server.start()
            self._server = server
        self.link.send(Listening(port))
        self._begin(self._end_with_front(order.hang_timeout))

    async def _end_with_front(self, seconds: float) -> None:
        """Ends this relay where the front, which pings at every poll, hangs, so that callers reconnect to another
        server."""
        self._life = SignsOfLife(seconds, lambda: None)
        await self._life.silence()
        _log.error("the front gave no sign of life for %g s", seconds)
        self._lost()

    def _current(self) -> http2.Identification:
        assert self._identification is not None
        return self._identification

    async def _stop(self, grace: float | None) -> None:
        if self._server is not None:
            await self._server.stop(grace)
        self.link.send(Stopped())

    def _lost(self) -> None:
        """Ends at once: callers find their connection broken, UNAVAILABLE, and may retry."""
        os._exit(0)


async def _run(fd: int) -> None:
    relay = Relay()
    await asyncio.get_running_loop().create_unix_connection(lambda: relay.link, sock=socket.socket(fileno=fd))
    await asyncio.gather(Heap().run(), Garbage().run(relay.live))


def _die_before_parent() -> None:
    """Makes the kernel kill this process before the front where memory runs out: a relay can be replaced."""
    with contextlib.suppress(OSError, ValueError):
        own = Path("/proc/self/oom_score_adj")
        own.write_text(str(min(1000, int(own.read_text()) + _OOM_SCORE)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--log-level", required=True)
    parser.add_argument("--log-format", required=True)
    arguments = parser.parse_args()
    logs.set_up(arguments.log_level, arguments.log_format, "relay")
    silence()
    _die_before_parent()
    for number in (signal.SIGTERM, signal.SIGINT):  # of whoever ends all processes of a service: calls are to end first
        signal.signal(number, signal.SIG_IGN)
    uvloop.run(_run(arguments.fd))


if __name__ == "__main__":
    main()
