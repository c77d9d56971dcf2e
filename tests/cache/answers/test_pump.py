"""A generation in a task of its own: how far ahead it goes, and what becomes of it when nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from cache.answers.pump import AHEAD, Pump
from cache.api import AnswerPart, Unfinished
from tests.cache.answers.one_answer import END

pytestmark = pytest.mark.virtual_time


class Counted:
    """So many parts, and counts those that were made."""

    def __init__(self, parts: int) -> None:
        self.made = 0
        self.closed = False
        self._parts = parts

    async def run(self) -> AsyncGenerator[AnswerPart, None]:
        try:
            while self.made < self._parts - 1:
                self.made += 1
                yield AnswerPart((7,), "x")
            yield AnswerPart((), "", END)
        finally:
            self.closed = True


async def test_it_goes_on_ahead_of_its_reader_so_far_and_no_further() -> None:
    tasks: set[asyncio.Task[None]] = set()
    source = Counted(3 * AHEAD)
    pump = Pump(source.run(), tasks)
    assert (await pump.next()).text == "x"
    await asyncio.sleep(0.1)
    assert AHEAD <= source.made <= AHEAD + 2
    assert len(tasks) == 1
    found = 1
    while (await pump.next()).ending is None:
        found += 1
    assert found == 3 * AHEAD - 1
    with pytest.raises(StopAsyncIteration):
        await pump.next()
    await asyncio.sleep(0)
    assert tasks == set()


async def test_an_interrupted_reader_loses_nothing() -> None:
    async def slow() -> AsyncGenerator[AnswerPart, None]:
        for token_id in range(5):
            await asyncio.sleep(0.01)
            yield AnswerPart((token_id,), "x")

    pump = Pump(slow(), set())
    found: list[int] = []
    while len(found) < 5:
        try:
            async with asyncio.timeout(0.003):
                found.extend((await pump.next()).token_ids)
        except TimeoutError:
            continue
    assert found == [0, 1, 2, 3, 4]


async def test_closing_ends_the_source_and_whoever_waits() -> None:
    source = Counted(10)

    async def stuck() -> AsyncGenerator[AnswerPart, None]:
        async for part in source.run():
            yield part
            await asyncio.sleep(60)

    pump = Pump(stuck(), set())
    await pump.next()
    waiting = asyncio.ensure_future(pump.next())
    await asyncio.sleep(0)
    pump.close()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(waiting, 60)
    unread = Counted(10)
    Pump(unread.run(), set()).close()
    assert unread.made == 0


@pytest.mark.parametrize(("raised", "expected"), [(RuntimeError, RuntimeError), (asyncio.CancelledError, Unfinished)])
async def test_what_the_source_raises_comes_after_its_parts(
    raised: type[BaseException], expected: type[Exception]
) -> None:
    async def failing() -> AsyncGenerator[AnswerPart, None]:
        yield AnswerPart((7,), "x")
        raise raised

    pump = Pump(failing(), set())
    assert (await pump.next()).text == "x"
    with pytest.raises(expected):
        await pump.next()
