"""Who may send a message, and how many bytes of them are held. Messages come when the test says so."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import cast

import grpc
import pytest

from service.core.errors import InvalidRequest, MessageStalled, Overloaded
from service.transport.call import inbox as module
from service.transport.call.context import Context
from service.transport.call.inbox import Inbox, InboxBounds

pytestmark = pytest.mark.virtual_time

BOUNDS = InboxBounds(message_bytes=1000, live_bytes=8000)  # four readers, two of one sender


class Sending:
    """A context."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.message: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.reading = False

    def peer(self) -> str:
        return self._peer

    async def read(self) -> object:
        self.reading = True
        return await self.message


class Callers:
    """Calls of some connections."""

    def __init__(self) -> None:
        self.refusals: Counter[str] = Counter()
        self.inbox = Inbox(BOUNDS, self.refusals)
        self.release = asyncio.Event()  # ends those that have read

    def call(self, peer: str) -> tuple[Sending, asyncio.Task[bytes]]:
        context = Sending(peer)

        async def run() -> bytes:
            with self.inbox.open(cast(Context, context), "t") as incoming:
                data = await incoming.read()
                await self.release.wait()
                return data

        return context, asyncio.create_task(run())

    def calls(self, peer: str, count: int) -> list[tuple[Sending, asyncio.Task[bytes]]]:
        return [self.call(peer) for _ in range(count)]


async def settled() -> None:
    """Everything that can run has run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def ended(calls: list[tuple[Sending, asyncio.Task[bytes]]]) -> None:
    for _, task in calls:
        task.cancel()
    await asyncio.gather(*(task for _, task in calls), return_exceptions=True)


async def test_as_many_read_as_there_is_room_for_and_no_sender_takes_all() -> None:
    callers = Callers()
    many = callers.calls("a", 10)
    await settled()
    assert [context.reading for context, _ in many] == [True] * 2 + [False] * 8
    others = callers.calls("b", 1)
    await settled()
    assert others[0][0].reading, "another sender waits behind a crowd"
    await ended(many + others)


async def test_turns_go_around_the_senders() -> None:
    callers = Callers()
    busy = [*callers.calls("x", 2), *callers.calls("y", 2)]
    await settled()
    waiting = callers.calls("a", 5)
    late = callers.calls("b", 1)
    await settled()
    assert not any(context.reading for context, _ in waiting + late)
    for context, _ in busy[:2]:
        context.message.set_result(b"m")
    await settled()
    assert [context.reading for context, _ in waiting].count(True) == 1
    assert late[0][0].reading
    await ended(busy + waiting + late)


async def test_a_reader_that_is_cancelled_gives_its_turn_on() -> None:
    callers = Callers()
    busy = [*callers.calls("x", 2), *callers.calls("y", 2)]
    waiting = callers.calls("a", 3)
    await settled()
    waiting[0][1].cancel()
    busy[0][1].cancel()
    await settled()
    assert [context.reading for context, _ in waiting] == [False, True, False]
    await ended(busy + waiting)
    again = callers.calls("x", 2)
    await settled()
    assert all(context.reading for context, _ in again)
    await ended(again)


async def test_slow_readers_lose_their_turn_where_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.02)
    callers = Callers()
    slow = [*callers.calls("x", 2), *callers.calls("y", 2)]
    await asyncio.sleep(0.1)
    assert not any(task.done() for _, task in slow), "nobody waited"
    waiting = callers.calls("a", 1)
    async with asyncio.timeout(60):
        with pytest.raises(Overloaded) as refusal:
            await slow[0][1]
    await settled()
    assert waiting[0][0].reading
    assert refusal.value.retry_after >= 1
    assert callers.refusals == {"MESSAGES": 1}
    assert not any(task.done() for _, task in slow[1:]), "more lost their turn than waited"
    await ended(slow + waiting)


async def test_a_crowd_loses_its_newest_to_those_who_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 5)
    callers = Callers()
    crowd = callers.calls("a", 7)  # two read, five wait
    few = callers.calls("b", 3)  # two read
    await settled()
    assert [task.done() for _, task in crowd] == [False] * 6 + [True]
    with pytest.raises(Overloaded):
        await crowd[6][1]
    assert not any(task.done() for _, task in few)
    await ended(crowd + few)


async def test_what_was_read_is_counted_until_the_call_ends() -> None:
    callers = Callers()
    held = callers.calls("a", 2) + callers.calls("b", 2)
    for context, _ in held:
        context.message.set_result(b"x" * 1000)
    await settled()
    over = callers.call("c")
    over[0].message.set_result(b"x")
    with pytest.raises(Overloaded):
        await over[1]
    callers.release.set()
    assert await asyncio.gather(*(task for _, task in held)) == [b"x" * 1000] * 4
    again = callers.call("c")
    again[0].message.set_result(b"x" * 1000)
    assert await again[1] == b"x" * 1000


async def test_a_message_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_READ", 0.01)
    callers = Callers()
    with pytest.raises(MessageStalled):
        await callers.call("a")[1]
    monkeypatch.setattr(module, "_LONGEST_WAIT", 0.01)
    monkeypatch.setattr(module, "_LONGEST_READ", 30.0)
    busy = callers.calls("a", 2)
    await settled()
    with pytest.raises(Overloaded):
        await callers.call("a")[1]
    await ended(busy)


async def test_reads_that_began_one_after_another_all_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One timer watches them: it is set again for those that began later, and once more after an idle time."""
    monkeypatch.setattr(module, "_LONGEST_READ", 0.05)
    callers = Callers()
    first = callers.call("a")[1]
    await asyncio.sleep(0.02)
    for stalled in (first, callers.call("b")[1], callers.call("c")[1]):
        async with asyncio.timeout(60):
            with pytest.raises(MessageStalled):
                await stalled
    async with asyncio.timeout(60):
        with pytest.raises(MessageStalled):
            await callers.call("a")[1]


async def test_a_call_without_a_message_is_invalid() -> None:
    context, task = Callers().call("a")
    context.message.set_result(grpc.aio.EOF)
    with pytest.raises(InvalidRequest):
        await task


async def test_large_messages_are_given_out_one_at_a_pass_of_the_loop() -> None:
    """So that twenty of them, each of which takes milliseconds to parse, do not stand in a row before a probe."""
    callers = Callers()
    callers.inbox = Inbox(InboxBounds(message_bytes=100_000, live_bytes=10_000_000), callers.refusals)
    order: list[str] = []

    async def parse(context: Sending) -> None:
        with callers.inbox.open(cast(Context, context), "t") as incoming:
            await incoming.read()
            order.append("parsed")

    contexts = [Sending("a") for _ in range(10)]
    tasks = [asyncio.create_task(parse(context)) for context in contexts]
    await settled()
    for context in contexts:
        context.message.set_result(b"x" * 70_000)
    while not all(task.done() for task in tasks):
        order.append("pass")
        await asyncio.sleep(0)
    assert "parsed parsed" not in " ".join(order)
