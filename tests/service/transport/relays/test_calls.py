"""The front's end of a relay, told by hand what happens there."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc

from service.transport.call.context import Context
from service.transport.relays.calls import RelayedCalls
from service.transport.relays.frames import CallEnded, CallStarted, Order, RelayLink, Report, WriteAccepted


class _Once:
    """Handlers of one method, which writes one message; notes how often it began."""

    def __init__(self) -> None:
        self.begun = 0

    def service(self, details: grpc.HandlerCallDetails) -> object:
        return grpc.stream_stream_rpc_method_handler(cast(Any, self.body))

    async def body(self, _: object, context: Context) -> None:
        self.begun += 1
        await context.write(b"one")


class _Sent(list[Order]):
    """A link whose other end is this list."""

    def send(self, order: Order) -> None:
        self.append(order)


def _begin(calls: RelayedCalls, sent: _Sent) -> None:
    calls.begin(CallStarted(7, "/test.Service/one", [], "ipv4:127.0.0.1:1", {}, None), cast(RelayLink[Report], sent))


async def _turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_call_that_ends_is_forgotten() -> None:
    handler, sent = _Once(), _Sent()
    calls = RelayedCalls(cast(Any, handler))
    _begin(calls, sent)
    await _turns()
    assert len(calls) == 1
    calls.on(WriteAccepted(7))
    await _turns()
    assert len(calls) == 0
    assert len(sent) == 2


async def test_a_caller_that_comes_and_goes_at_once_leaves_nothing() -> None:
    """Both told by one read of the socket, so that the call's task is cancelled before its first turn."""
    handler, sent = _Once(), _Sent()
    calls = RelayedCalls(cast(Any, handler))
    _begin(calls, sent)
    calls.on(CallEnded(7, late=False))
    await _turns()
    assert (len(calls), handler.begun, sent) == (0, 0, [])
