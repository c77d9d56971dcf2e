"""Writes that nobody waits for: bounded in number and bytes, and what fails is counted and forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cache.api import CacheKey, EntryKind, StoreFault
from cache.open.counters import Counters
from cache.store.writer import BATCH, QueuedWrite, WriteQueue


def write(number: int, size: int = 10) -> QueuedWrite:
    return QueuedWrite(CacheKey(EntryKind.RESPONSE, "ab" * 16, f"{number:064x}"), bytes(size), 60.0)


class Door:
    """Takes writes once it is open, or fails."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.fails = False
        self.batches: list[int] = []

    async def flush(self, writes: Sequence[QueuedWrite]) -> None:
        await self.open.wait()
        self.batches.append(len(writes))
        if self.fails:
            raise StoreFault("no")


async def test_no_more_wait_than_may_and_room_comes_back(counters: Counters) -> None:
    door = Door()
    queue = WriteQueue(door.flush, 1000, 100, counters)
    assert [queue.offer(write(number)) for number in range(11)] == [True] * 10 + [False]
    assert queue.held == 100
    await asyncio.sleep(0)
    assert not queue.offer(write(11)), "what is on its way takes room as well"
    door.open.set()
    await queue.drained()
    assert queue.held == 0
    assert queue.offer(write(12, 100))
    assert not queue.offer(write(13, 1))
    await queue.drained()
    assert counters.counts()["cache_write_dropped", "response"] == 3
    assert sum(door.batches) == 11


async def test_the_number_of_writes_is_bounded_too(counters: Counters) -> None:
    door = Door()
    queue = WriteQueue(door.flush, 3, 1 << 20, counters)
    assert [queue.offer(write(number, 0)) for number in range(5)] == [True] * 3 + [False] * 2
    door.open.set()
    await queue.drained()
    assert queue.offer(write(9))
    await queue.drained()


async def test_many_go_together(counters: Counters) -> None:
    door = Door()
    queue = WriteQueue(door.flush, 1000, 1 << 20, counters)
    for number in range(2 * BATCH + 1):
        queue.offer(write(number))
    door.open.set()
    await queue.drained()
    assert door.batches == [BATCH, BATCH, 1]


async def test_a_store_that_fails_costs_its_batch_alone(counters: Counters) -> None:
    door = Door()
    queue = WriteQueue(door.flush, 1000, 1 << 20, counters)
    door.fails = True
    door.open.set()
    for number in range(BATCH + 2):
        queue.offer(write(number))
    await queue.drained()
    assert counters.counts()["cache_write_failed", ""] == BATCH + 2
    assert (queue.held, door.batches) == (0, [BATCH, 2])
    door.fails = False
    assert queue.offer(write(1))
    await queue.drained()
    assert door.batches[-1] == 1


async def test_closing_waits_so_long_and_forgets_the_rest(counters: Counters) -> None:
    door = Door()
    queue = WriteQueue(door.flush, 1000, 1 << 20, counters)
    queue.offer(write(1))
    async with asyncio.timeout(60):
        await queue.aclose(0.02)
    assert (queue.held, door.batches) == (0, [])
