"""How ports close without a call that ends badly.

A server of gRPC that shuts down says GOAWAY on its connections, and from that moment until the client has heard it, a
call that comes in is dropped as CANCELLED, which no client retries. So before that, new calls are kept waiting: who
calls in a loop is soon waiting for an answer, and calls no more. Then comes GOAWAY, and after it on the same connection
the answer, a refusal with a retry hint. The next call makes a connection anew, here or elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc

_QUIET = 0.1  # seconds without a new call after which everybody who calls is taken to wait
_LONGEST_HOLD = 0.5  # seconds, however many still come
_GOAWAY = 0.05  # seconds that GOAWAY gets to be on its way before answers follow it

if TYPE_CHECKING:  # neither has parameters while it runs
    _Interceptor = grpc.aio.ServerInterceptor[bytes, bytes]
    _Handler = grpc.RpcMethodHandler[bytes, bytes]
else:
    _Interceptor = grpc.aio.ServerInterceptor
    _Handler = grpc.RpcMethodHandler


class Gate(_Interceptor):
    """Stands before every method of every port."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._came = asyncio.Event()  # another call, while they wait

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        if not self._open.is_set():
            self._came.set()
            await self._open.wait()
        return await continuation(handler_call_details)

    async def close(self, servers: Sequence[grpc.aio.Server], grace: float) -> None:
        """Closes the ports. By now every handler refuses what is new; those that run get `grace` seconds to end."""
        await self._hold()
        stopping = [asyncio.ensure_future(server.stop(grace)) for server in servers]
        await asyncio.sleep(_GOAWAY)
        self._open.set()
        await asyncio.gather(*stopping)

    async def _hold(self) -> None:
        """New calls wait from here on. Returns once no more come."""
        self._open.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_HOLD):
                while True:
                    self._came.clear()
                    async with asyncio.timeout(_QUIET):
                        await self._came.wait()
