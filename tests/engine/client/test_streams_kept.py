"""What has no first token outlives the process that had it. The test plays the engine."""

from __future__ import annotations

import asyncio
import time

import pytest

from engine.api import FinishReason, TokenEvents, TokenLogprob
from engine.client.inbox import InboxStream
from engine.errors import DeadlineExceeded, EngineUnavailable, Quarantined
from engine.fake import plain_request
from engine.ipc.events import Event
from engine.ipc.frames import Submit
from engine.ipc.step_mark import MarkedStep
from tests.engine.client.test_streams import FINISH, Desk


def unavailable() -> EngineUnavailable:
    return EngineUnavailable("gone", 1.5)


def submitted(desk: Desk) -> list[tuple[int, tuple[int, ...]]]:
    """Keys and prompts since the last call."""
    sent = [(command.key, command.request.token_ids) for command in desk.sent if isinstance(command, Submit)]
    desk.sent.clear()
    return sent


async def ends_unavailable(stream: InboxStream) -> None:
    with pytest.raises(EngineUnavailable):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_what_has_no_token_is_submitted_again_in_its_order_and_the_rest_ends() -> None:
    desk = Desk()
    first, begun, last = (desk.streams.open(plain_request((number,))) for number in (1, 2, 3))
    reader = asyncio.create_task(anext(first))
    desk.streams.deliver([Event(2, (5,))])
    submitted(desk)
    desk.streams.lose(unavailable)
    assert await anext(begun) == TokenEvents((5,))
    await ends_unavailable(begun)
    assert len(desk.streams) == 2
    desk.streams.deliver([Event(1, (99,)), Event(3, (99,))])  # from a process that hung, not yet quite gone
    desk.streams.clear_crash()
    assert desk.sent == []
    desk.streams.resume()
    assert submitted(desk) == [(4, (1,)), (5, (3,))]
    desk.streams.deliver([Event(1, (99,)), Event(4, (7,)), Event(5, (8,), (), FINISH), Event(4, (9,), (), FINISH)])
    assert await reader == TokenEvents((7, 9), (), FINISH)
    assert await anext(last) == TokenEvents((8,), (), FINISH)
    assert len(desk.streams) == 0


async def test_it_outlives_any_number_of_processes_that_others_ended() -> None:
    desk = Desk()
    stream = desk.streams.open(plain_request((1,)))
    for _ in range(20):
        desk.streams.lose(unavailable)
        desk.streams.clear_crash()
        desk.streams.resume()
    desk.streams.deliver([Event(21, (7,), (), FINISH)])
    assert await anext(stream) == TokenEvents((7,), (), FINISH)


async def test_but_three_at_most_that_died_outside_of_a_step() -> None:
    """Of whatever they were given: of reading it, for one."""
    desk = Desk()
    stream = desk.streams.open(plain_request((1,)))
    for count in range(3):
        assert len(desk.streams) == 1, count
        desk.streams.lose(unavailable)
        desk.streams.attribute_crash(MarkedStep(), 1, unavailable)
        desk.streams.resume()
    await ends_unavailable(stream)
    assert len(desk.streams) == 0


async def test_those_that_only_waited_have_nothing_to_do_with_a_death() -> None:
    desk = Desk()
    stream = desk.streams.open(plain_request((1,)))
    for _ in range(20):
        desk.streams.lose(unavailable)
        desk.streams.attribute_crash(MarkedStep((77,)), 1, unavailable)
        desk.streams.resume()
    assert len(desk.streams) == 1
    stream.cancel()


async def test_a_cancel_while_it_is_kept_is_the_end_of_it() -> None:
    desk = Desk()
    stream = desk.streams.open(plain_request((1,), deadline=time.monotonic() + 60))
    desk.streams.lose(unavailable)
    submitted(desk)
    stream.cancel()
    desk.streams.resume()
    assert desk.sent == []
    assert len(desk.streams) == 0


async def test_its_time_runs_on_while_it_is_kept() -> None:
    desk = Desk()
    now = time.monotonic()
    late = desk.streams.open(plain_request((1,), deadline=now + 0.02, expires_at=now + 9))
    over = desk.streams.open(plain_request((2,), deadline=now + 9, expires_at=now + 0.02))
    desk.streams.lose(unavailable)
    with pytest.raises(DeadlineExceeded):
        await anext(late)
    events = await anext(over)
    assert events.token_ids == ()
    assert events.finish is not None
    assert events.finish.reason is FinishReason.TIME_BUDGET
    assert events.finish.queue > 0
    submitted(desk)
    desk.streams.resume()
    assert desk.sent == []
    assert len(desk.streams) == 0


async def test_nobody_waits_for_ever() -> None:
    desk = Desk()
    streams = [desk.streams.open(plain_request((number,), deadline=time.monotonic() + 60)) for number in range(2)]
    desk.streams.lose(unavailable)
    desk.streams.give_up(unavailable)
    for stream in streams:
        await ends_unavailable(stream)
    assert len(desk.streams) == 0


async def test_who_was_alone_in_a_step_at_two_deaths_is_refused_and_runs_alone_before() -> None:
    desk = Desk()
    culprit, mate = desk.streams.open(plain_request((1,))), desk.streams.open(plain_request((2,)))
    waiting = desk.streams.open(plain_request((3,)))
    desk.sent.clear()
    desk.streams.lose(unavailable)
    desk.streams.attribute_crash(MarkedStep((1, 2)), 1, unavailable)
    desk.streams.resume()
    assert [command.solo for command in desk.sent if isinstance(command, Submit)] == [(0, 2), (0, 2), (0, 0)]
    desk.streams.lose(unavailable)
    desk.streams.attribute_crash(MarkedStep((4,), alone=True), 1, unavailable)
    desk.sent.clear()
    desk.streams.resume()
    with pytest.raises(Quarantined):
        await anext(culprit)
    with pytest.raises(Quarantined):
        desk.streams.open(plain_request((1,)))
    assert [key for key, _ in submitted(desk)] == [7, 8]
    desk.streams.deliver([Event(7, (5,), (), FINISH), Event(8, (6,), (), FINISH)])
    assert [await anext(stream) for stream in (mate, waiting)] == [
        TokenEvents((5,), (), FINISH),
        TokenEvents((6,), (), FINISH),
    ]


async def test_who_gave_up_while_the_step_went_on_is_a_suspect_too() -> None:
    """Callers whose deadlines are shorter than the hang timeout would otherwise never be found."""
    desk = Desk()
    for _ in range(2):
        stream = desk.streams.open(plain_request((1,)))
        key = max(command.key for command in desk.sent if isinstance(command, Submit))
        desk.streams.deliver([])
        stream.cancel()
        desk.streams.lose(unavailable)
        desk.streams.attribute_crash(MarkedStep((key,), alone=True), 1, unavailable)
    with pytest.raises(Quarantined):
        desk.streams.open(plain_request((1,)))


async def test_what_was_said_of_a_prompt_is_not_said_again() -> None:
    desk = Desk()
    scores = tuple(TokenLogprob(-float(number), ()) for number in range(4))
    stream = desk.streams.open(plain_request((1, 2, 3, 4, 5), prompt_logprobs=0))
    desk.streams.deliver([Event(1, prompt_logprobs=scores[:2])])
    assert (await anext(stream)).prompt_logprobs == scores[:2]
    desk.streams.lose(unavailable)
    desk.streams.clear_crash()
    desk.streams.resume()
    desk.streams.deliver([Event(2, prompt_logprobs=scores[:1])])
    desk.streams.deliver([Event(2, prompt_logprobs=scores[1:3])])
    desk.streams.deliver([Event(2, (7,), (), FINISH, prompt_logprobs=scores[3:])])
    told = await anext(stream)
    assert told.prompt_logprobs == scores[2:]
    assert told.token_ids == (7,)
