"""Closes a port without a call that ends badly.

A gRPC server that shuts down sends GOAWAY, and drops as CANCELLED, which no client retries, calls that arrive before
the client has it. So new calls are first kept waiting, until clients send no more. Then GOAWAY is sent, and behind it
the refusal with a retry hint, so that the next call makes a new connection. Running calls go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, cast

import grpc

_QUIET = 0.1  # seconds without a new call after which everybody who calls is taken to wait
_LONGEST_HOLD = 2.5  # seconds, however many still come: 256 calls of one connection, at 100 a second
_GOAWAY = 0.05  # seconds that GOAWAY gets to be on its way before answers follow it
_AS_LONG_AS_IT_TAKES = 1e6  # seconds; without a number, gRPC cancels at once

if TYPE_CHECKING:  # neither has parameters while it runs
    _GenericHandler = grpc.GenericRpcHandler[bytes, bytes]
    _Handler = grpc.RpcMethodHandler[bytes, bytes]
else:
    _GenericHandler = grpc.GenericRpcHandler
    _Handler = grpc.RpcMethodHandler


class Stoppable(Protocol):
    async def stop(self, grace: float | None) -> None: ...


_Body = Callable[[object, object], Awaitable[bytes | None]]  # of a method: its requests, its context


class Gate(_GenericHandler):
    """Stands before every method of a port. An interceptor of gRPC's would cost each call three coroutines; so this
    looks methods up, and gives out those that wait only while it is closed."""

    def __init__(self, handlers: Sequence[grpc.GenericRpcHandler[bytes, bytes]]) -> None:
        """The first of the `handlers` that knows a method handles it."""
        self._handlers = tuple(handlers)
        self._open = asyncio.Event()
        self._open.set()
        self._came = asyncio.Event()  # another call, while they wait
        self._patience = _LONGEST_HOLD
        self._limit: asyncio.Timeout | None = None  # while new calls are kept waiting
        self._leaving: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> _Handler | None:
        for handler in self._handlers:
            found = handler.service(handler_call_details)
            if found is not None:
                return found if self._open.is_set() else self._kept_waiting(found)
        return None

    def leave(self, server: Stoppable) -> asyncio.Task[None]:
        """Stops accepting connections and sends clients elsewhere, once every handler refuses new calls. The task ends
        once all clients have been notified."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(server))
        return self._leaving

    def hurry(self) -> None:
        """Leaving matters more than how calls end."""
        self._patience = 0.0
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(0.0)

    async def close(self, server: Stoppable, grace: float) -> None:
        """Gives running calls `grace` seconds."""
        await self.leave(server)
        await server.stop(grace)

    def _kept_waiting(self, handler: _Handler) -> _Handler:
        self._came.set()
        streams = handler.response_streaming
        body = cast(_Body, handler.stream_stream if streams else handler.stream_unary)
        make = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler

        async def handle(requests: object, context: object) -> bytes | None:
            await self._open.wait()
            return await body(requests, context)

        return make(handle)

    async def _leave(self, server: Stoppable) -> None:
        await self._hold()
        self._stopping = asyncio.create_task(server.stop(_AS_LONG_AS_IT_TAKES))
        await asyncio.sleep(_GOAWAY)
        self._open.set()

    async def _hold(self) -> None:
        """Holds new calls from here on. Returns once no more arrive."""
        self._open.clear()
        clock = asyncio.get_running_loop().time
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience) as self._limit:
                seen = clock()
                # What passed while this loop stood still was no silence: calls may lie in gRPC, which it would drop.
                while await self._another() or clock() - seen > 2 * _QUIET:
                    seen = clock()
        self._limit = None

    async def _another(self) -> bool:
        self._came.clear()
        try:
            async with asyncio.timeout(_QUIET):
                return await self._came.wait()
        except TimeoutError:
            return False
