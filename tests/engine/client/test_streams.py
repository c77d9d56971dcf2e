"""Inboxes without an engine: the test plays it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import statistics

import pytest
from msgspec.structs import replace

from engine.api import Finish, FinishReason, Priority, Start, TokenEvents, TokenLogprob
from engine.client.streams import Streams
from engine.errors import Aborted, DeadlineExceeded, EngineFailed, EngineUnavailable
from engine.fake import plain_request
from engine.ipc.events import Event, Failure
from engine.ipc.frames import Cancel, Command, Pause, Resume, Submit

FINISH = Finish(reason=FinishReason.LENGTH, stop_token_id=None, cached_tokens=0, queue=0.0, prefill=0.0, decode=0.0)


class Desk:
    """The streams of a front whose commands are kept."""

    def __init__(self, cap: int = 1000) -> None:
        self.sent: list[Command] = []
        self.streams = Streams(asyncio.get_running_loop(), self.sent.append, cap)

    def commands(self) -> list[Command]:
        """What was sent since the last call, requests left out."""
        commands = [command for command in self.sent if not isinstance(command, Submit)]
        self.sent.clear()
        return commands


async def test_events_come_in_order_and_end_with_the_finish() -> None:
    desk = Desk()
    stream = desk.streams.open(plain_request((1,)))
    start = Start(cached_tokens=0, queue=0.5, prefill=0.25)
    desk.streams.deliver([Event(1, (4,), start=start), Event(1, (5,))])
    assert await anext(stream) == TokenEvents((4, 5), start=start)
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    desk.streams.deliver([Event(1, (6,)), Event(2, (99,))])
    assert await reader == TokenEvents((6,))
    desk.streams.deliver([Event(1, (7,)), Event(1, (8, 9))])
    desk.streams.deliver([Event(1, (), (), FINISH)])
    assert await anext(stream) == TokenEvents((7, 8, 9), (), FINISH), "what waits together is read together"
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert len(desk.streams) == 0
    stream.cancel()
    stream.abort("late")
    assert desk.commands() == []


async def test_logprobs_stay_beside_their_ids() -> None:
    desk = Desk()
    stream = desk.streams.open(plain_request((1,)))
    one, two = TokenLogprob(-1.0, ((5, -1.0),)), TokenLogprob(-2.0, ())
    desk.streams.deliver([Event(1, (5,), (one,)), Event(1, (6,), (two,))])
    assert await anext(stream) == TokenEvents((5, 6), (one, two))
    stream.cancel()


async def test_a_full_inbox_pauses_and_a_read_one_resumes() -> None:
    desk = Desk(cap=4 * 44)
    stream = desk.streams.open(plain_request((1,)))
    desk.streams.deliver([Event(1, (1,))] * 4)
    assert desk.commands() == []
    desk.streams.deliver([Event(1, (1,))])
    assert desk.commands() == [Pause(1)]
    desk.streams.deliver([Event(1, (1,))] * 3)
    assert desk.commands() == [], "it is paused already"
    assert len((await anext(stream)).token_ids) == 8
    assert desk.commands() == [], "the reader is still at it"
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    assert desk.commands() == [Resume(1)]
    desk.streams.deliver([Event(1, (1,))] * 4)
    assert desk.commands() == [], "a reader that waits holds nothing"
    desk.streams.deliver([Event(1, (1,))])
    assert desk.commands() == [Pause(1)]
    await reader
    stream.cancel()
    assert desk.commands() == [Cancel(1)]


async def test_what_the_reader_holds_counts_too() -> None:
    desk = Desk(cap=4 * 44)
    stream = desk.streams.open(plain_request((1,)))
    desk.streams.deliver([Event(1, (1,))] * 3)
    await anext(stream)
    desk.streams.deliver([Event(1, (1,))] * 2)
    assert desk.commands() == [Pause(1)]
    await anext(stream)
    assert desk.commands() == [Resume(1)], "two of four are no more than half"
    stream.cancel()


async def test_logprobs_count_by_what_they_take() -> None:
    desk = Desk(cap=1000)
    stream = desk.streams.open(plain_request((1,), logprobs=20))
    desk.streams.deliver([Event(1, (1,), (TokenLogprob(-1.0, ((1, -1.0),) * 20),))] * 3)
    assert desk.commands() == []
    desk.streams.deliver([Event(1, (1,), (TokenLogprob(-1.0, ((1, -1.0),) * 20),))])
    assert desk.commands() == [Pause(1)]
    stream.cancel()


async def test_memory_is_bounded_for_any_reader() -> None:
    """An engine that obeys pauses one step late, and a reader with moods."""
    rng = random.Random(4)
    desk = Desk(cap=2000)
    stream = desk.streams.open(plain_request((1,)))
    paused = False
    made = read = 0
    pending: asyncio.Task[TokenEvents] | None = None
    for _ in range(10_000):
        if not paused:
            desk.streams.deliver([Event(1, (made,))])
            made += 1
        if pending is None and rng.random() < (0.3 if rng.random() < 0.1 else 0.01):
            pending = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        if pending is not None and pending.done():
            ids = pending.result().token_ids
            assert ids == tuple(range(read, read + len(ids)))
            read += len(ids)
            pending = None
        for command in desk.commands():
            paused = isinstance(command, Pause)
        assert (made - read) * 44 <= 2000 + 2 * 44
    if pending is not None:
        pending.cancel()
    while read < made:
        read += len((await anext(stream)).token_ids)
    assert read > 1000
    stream.cancel()


@pytest.mark.parametrize(("failure", "error"), [(Failure.DEADLINE, DeadlineExceeded), (Failure.STEP, EngineFailed)])
async def test_failures_come_after_what_came_before_them(failure: Failure, error: type[Exception]) -> None:
    desk = Desk()
    stream = desk.streams.open(plain_request((1,)))
    desk.streams.deliver([Event(1, (5,)), Event(1, failure=failure)])
    assert await anext(stream) == TokenEvents((5,))
    with pytest.raises(error):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert len(desk.streams) == 0
    assert desk.commands() == []


async def test_loss_of_the_engine_ends_all_each_with_its_own_error() -> None:
    desk = Desk()
    streams = [desk.streams.open(plain_request((1,))) for _ in range(3)]
    desk.streams.deliver([Event(2, (5,))])
    readers = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    desk.streams.fail(lambda: EngineUnavailable("gone", 1.5))
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert results[1] == TokenEvents((5,))
    assert all(isinstance(result, EngineUnavailable) for result in results[::2])
    assert results[0] is not results[2]
    with pytest.raises(EngineUnavailable):
        await anext(streams[1])
    assert len(desk.streams) == 0
    assert desk.commands() == [], "there is nobody to tell"


async def test_cancel_ends_the_reader_and_tells_the_engine_once() -> None:
    desk = Desk()
    stream = desk.streams.open(plain_request((1,)))
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.cancel()
    stream.cancel()
    with pytest.raises(StopAsyncIteration):
        await reader
    assert desk.commands() == [Cancel(1)]
    desk.streams.deliver([Event(1, (5,))])
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_abort_reaches_the_reader_at_once() -> None:
    desk = Desk()
    stream = desk.streams.open(plain_request((1,)))
    desk.streams.deliver([Event(1, (5,))])
    stream.abort("stalled")
    with pytest.raises(Aborted, match="stalled"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert desk.commands() == [Cancel(1)]


async def test_a_reader_may_give_up_and_another_take_over() -> None:
    desk = Desk()
    stream = desk.streams.open(plain_request((1,)))
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one reader"):
        await anext(stream)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    desk.streams.deliver([Event(1, (5,))])
    assert await anext(stream) == TokenEvents((5,))
    stream.cancel()


async def test_a_generator_that_only_sees_generator_exit_can_cancel() -> None:
    desk = Desk()

    async def handler() -> object:
        stream = desk.streams.open(plain_request((1,)))
        try:
            async for events in stream:
                yield events
        finally:
            stream.cancel()

    answers = handler()
    desk.streams.deliver([])
    first = asyncio.ensure_future(anext(answers))
    await asyncio.sleep(0)
    desk.streams.deliver([Event(1, (5,))])
    await first
    await answers.aclose()
    assert desk.commands() == [Cancel(1)]


async def test_a_dropped_stream_cancels_itself() -> None:
    desk = Desk()
    stream = desk.streams.open(plain_request((1,)))
    desk.streams.deliver([Event(1, (5,))])
    del stream
    gc.collect()
    await asyncio.sleep(0)
    assert desk.commands() == [Cancel(1)]
    assert len(desk.streams) == 0


def test_a_stream_dropped_after_its_loop_is_silent() -> None:
    async def main() -> object:
        return Desk().streams.open(plain_request((1,)))

    stream = asyncio.run(main())
    del stream
    gc.collect()


async def woken(task: asyncio.Task[TokenEvents]) -> bool:
    """Whether the reader has got something, after a turn of the loop or two."""
    for _ in range(3):
        await asyncio.sleep(0)
    return task.done()


async def test_a_batching_reader_sleeps_until_there_is_enough() -> None:
    desk = Desk()
    stream = desk.streams.open(plain_request((1,)))
    stream.batch(4, 60.0)
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    for token_id in range(3):
        desk.streams.deliver([Event(1, (token_id,))])
        assert not await woken(reader)
    desk.streams.deliver([Event(1, (3, 4))])
    assert await reader == TokenEvents((0, 1, 2, 3, 4))
    desk.streams.deliver([Event(1, (5,)), Event(1, (), (), FINISH)])
    assert await anext(stream) == TokenEvents((5,), (), FINISH), "the end does not wait"


async def test_a_batching_reader_wakes_after_its_delay() -> None:
    desk = Desk()
    stream = desk.streams.open(plain_request((1,)))
    stream.batch(4, 0.05)
    for token_id in range(2):
        started = asyncio.get_running_loop().time()
        desk.streams.deliver([Event(1, (token_id,))])
        assert await anext(stream) == TokenEvents((token_id,))
        assert asyncio.get_running_loop().time() - started >= 0.049
    stream.cancel()


async def test_a_batching_reader_hears_of_failures_and_of_pauses_at_once() -> None:
    desk = Desk(cap=100)
    stream = desk.streams.open(plain_request((1,)))
    stream.batch(1000, 60.0)
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    desk.streams.deliver([Event(1, (1,) * 10)])
    assert (await reader).token_ids == (1,) * 10, "the sequence is paused, so that nothing more would come"
    assert desk.commands() == [Pause(1)]
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    desk.streams.deliver([Event(1, (2,)), Event(1, failure=Failure.STEP)])
    assert await reader == TokenEvents((2,))
    with pytest.raises(EngineFailed):
        await anext(stream)


@pytest.mark.parametrize(("count", "at_once"), [(64, 64), (65, 8), (256, 8)])
async def test_where_there_are_many_a_turn_of_the_event_loop_wakes_few_readers(count: int, at_once: int) -> None:
    desk, loop = Desk(), asyncio.get_running_loop()
    streams = [desk.streams.open(plain_request((1,))) for _ in range(count)]
    readers = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    before: list[int] = []  # readers that were served, at each turn that other work got

    def other_work() -> None:
        before.append(sum(reader.done() for reader in readers))
        if before[-1] < len(readers):
            loop.call_soon(other_work)

    desk.streams.deliver([], range(1, count + 1), range(count))
    loop.call_soon(other_work)
    assert [events.token_ids for events in await asyncio.gather(*readers)] == [(one,) for one in range(count)]
    await asyncio.sleep(0)
    assert max(after - earlier for earlier, after in itertools.pairwise([0, *before])) == at_once


async def test_between_turns_that_wake_readers_others_pass_in_which_a_watched_one_is_woken_at_once() -> None:
    desk, loop = Desk(), asyncio.get_running_loop()
    watched = replace(plain_request((1,)), priority=Priority.INTERACTIVE)
    streams = [desk.streams.open(watched if number == 0 else plain_request((1,))) for number in range(129)]
    desk.streams.deliver([], range(1, 130), [0] * 129)
    for stream in streams:
        await anext(stream)
    others = [asyncio.create_task(anext(stream)) for stream in streams[1:]]
    await asyncio.sleep(0)
    served: list[int] = []  # at each turn that other work got
    lively: list[int] = []  # turns that a token of the watched one took

    def other_work() -> None:
        served.append(sum(reader.done() for reader in others))
        if served[-1] < len(others):
            loop.call_soon(other_work)

    async def watch() -> None:
        while not lively or served[-1] < len(others):
            reader, before = asyncio.create_task(anext(streams[0])), len(served)
            await asyncio.sleep(0)
            desk.streams.deliver([], [1], [7])
            await reader
            lively.append(len(served) - before)

    desk.streams.deliver([], range(2, 130), range(128))
    loop.call_soon(other_work)
    await watch()
    await asyncio.gather(*others)
    turns = [after > earlier for earlier, after in itertools.pairwise(served)]
    assert sum(turns) <= len(turns) / 3, "three of four turns wake none of the others"
    assert statistics.median(lively) <= 3


async def test_who_is_cancelled_before_its_turn_is_not_waited_for() -> None:
    desk = Desk()
    streams = [desk.streams.open(plain_request((1,))) for _ in range(32)]
    readers = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    desk.streams.deliver([], range(1, 33), range(32))
    readers[20].cancel()
    streams[20].cancel()
    streams[21].abort("late")
    found = await asyncio.gather(*readers, return_exceptions=True)
    assert isinstance(found[20], asyncio.CancelledError)
    assert isinstance(found[21], Aborted)
    assert [one for one in found if isinstance(one, TokenEvents)] == [
        TokenEvents((n,)) for n in range(32) if n not in (20, 21)
    ]
    desk.streams.deliver([], [2], [7])
    assert await anext(streams[1]) == TokenEvents((7,))


async def test_who_waits_for_a_first_token_or_is_watched_is_woken_before_the_others() -> None:
    desk = Desk()
    watched = replace(plain_request((1,)), priority=Priority.INTERACTIVE)
    streams = [desk.streams.open(watched if number == 40 else plain_request((1,))) for number in range(128)]
    desk.streams.deliver([], range(1, 121), [0] * 120)
    for stream in streams[:120]:
        await anext(stream)
    order: list[int] = []

    async def read(number: int) -> None:
        await anext(streams[number])
        order.append(number)

    readers = [asyncio.create_task(read(number)) for number in range(128)]
    await asyncio.sleep(0)
    desk.streams.deliver([], range(1, 129), [1] * 128)
    await asyncio.gather(*readers)
    late = [number for number in range(8, 120) if number != 40]
    assert order == [*range(8), 40, *range(120, 128), *late], (
        "a turn's worth, then the one that is watched and the new ones"
    )
