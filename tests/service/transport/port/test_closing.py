"""How long new calls are kept waiting before a port closes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast
from unittest.mock import AsyncMock, MagicMock

import grpc
import pytest

from service.transport.port import closing
from service.transport.port.closing import Gate

CALL = b"what the handler answers"


def gate_and_call() -> tuple[Gate, Callable[[], asyncio.Task[object]]]:
    async def handler(requests: object, context: object) -> bytes:
        return CALL

    services = [MagicMock(service=MagicMock(return_value=None)), MagicMock()]  # the first does not know the method
    services[1].service.return_value = grpc.stream_unary_rpc_method_handler(handler)
    gate = Gate(services)

    async def call() -> object:
        found = gate.service(MagicMock())
        assert found is not None
        assert not found.response_streaming
        body = cast(Callable[[object, object], Awaitable[object]], found.stream_unary)
        return await body(MagicMock(), MagicMock())

    return gate, lambda: asyncio.ensure_future(call())


async def test_calls_that_come_before_wait_until_goaway_is_said() -> None:
    gate, call = gate_and_call()
    assert await call() is CALL
    server = MagicMock(stop=AsyncMock())
    leaving = gate.leave(server)
    await asyncio.sleep(0)
    waiting = call()
    await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
    assert server.stop.called
    assert await waiting is CALL
    await leaving
    assert gate.leave(server) is leaving
    assert await call() is CALL  # answered, which is to say refused


class Clock:
    """The loop's, moved on by hand: timers that are due by then go off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop, self._passed = asyncio.get_running_loop(), 0.0
        clock = loop.time
        monkeypatch.setattr(loop, "time", lambda: clock() + self._passed)

    async def forward(self, seconds: float) -> None:
        self._passed += seconds
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Beside hours, the seconds that this machine takes are nothing."""
    monkeypatch.setattr(closing, "_QUIET", 3600.0)
    monkeypatch.setattr(closing, "_LONGEST_HOLD", 25 * 3600.0)
    return Clock(monkeypatch)


async def test_as_long_as_calls_come_they_are_held_up_to_a_limit(clock: Clock) -> None:
    """A client that does not wait for answers has by then as many calls on its connection as it may have."""
    gate, call = gate_and_call()
    server = MagicMock(stop=AsyncMock())
    leaving = gate.leave(server)
    await clock.forward(0)
    calls = []
    for _ in range(26):
        assert not server.stop.called
        calls.append(call())
        await clock.forward(0.95 * 3600)
    assert not server.stop.called
    await clock.forward(0.95 * 3600)
    await leaving
    assert server.stop.called
    assert await asyncio.gather(*calls) == [CALL] * 26


async def test_a_time_in_which_nobody_listened_was_no_silence(clock: Clock) -> None:
    """Calls that came meanwhile lie in gRPC, unseen, and it would drop them."""
    gate, call = gate_and_call()
    server = MagicMock(stop=AsyncMock())
    leaving = gate.leave(server)
    await clock.forward(0)
    await clock.forward(6 * 3600)  # the loop was held up
    assert not server.stop.called
    waiting = call()
    await clock.forward(0)
    await clock.forward(1.1 * 3600)  # it was not
    await leaving
    assert server.stop.called
    assert await waiting is CALL


async def test_who_is_in_a_hurry_waits_for_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    for patience in ("_QUIET", "_LONGEST_HOLD"):
        monkeypatch.setattr(closing, patience, 3600.0)
    gate, call = gate_and_call()
    server = MagicMock(stop=AsyncMock())
    leaving = gate.leave(server)
    await asyncio.sleep(0)
    calls = [call() for _ in range(3)]
    await asyncio.wait(calls, timeout=0.01)
    assert not server.stop.called
    gate.hurry()
    await asyncio.wait_for(leaving, 60)
    assert server.stop.called
    assert await asyncio.gather(*calls) == [CALL] * 3


async def test_nor_if_the_hurry_came_before() -> None:
    gate, call = gate_and_call()
    gate.hurry()
    server = MagicMock(stop=AsyncMock())
    leaving = gate.leave(server)
    await leaving
    await gate.close(server, 1.0)
    assert server.stop.call_args.args == (1.0,)
    assert await call() is CALL
