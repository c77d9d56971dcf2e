"""Answers as they are read: generated for this request, by somebody else, or stored; their parts, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import repeat

import pytest
from msgspec.structs import replace

from cache.api import BEGUN, AnswerEnding, AnswerPart, CachedCompletion, LeaderRefused, Unfinished
from engine.api import Finish, FinishReason, Priority, Start, TokenEvents
from engine.errors import Aborted, DeadlineExceeded, EngineUnavailable
from engine.fake import plain_request
from service.config.settings import LimitOptions
from service.core.admission.admission_slots import AdmissionSlots
from service.core.answers.delivery import MANY, MOST, coalescing_delay
from service.core.answers.engine_answer import EngineAnswer, Generating
from service.core.answers.sources import SharedAnswer
from service.core.request import CacheUse, Delivery, Output, Request, Stops, TokenPrompt
from service.core.text import Detokenizer, Tokenizer
from tests.service.scripted import Script, ScriptedEngine

START = Start(cached_tokens=2, queue=0.5, prefill=0.25)
FINISH = Finish(reason=FinishReason.LENGTH, stop_token_id=None, cached_tokens=2, queue=0.5, prefill=0.25, decode=1.0)
END = AnswerEnding(reason="length", prompt_tokens=1, completion_tokens=3)
ONE = repeat(1)
REQUEST = Request(
    request_id="one",
    prompt=TokenPrompt((120,)),
    sampling=plain_request((120,)).sampling,
    stops=Stops(max_tokens=9, min_tokens=0, strings=(), token_ids=(), include=False),
    output=Output(True, False, None),
    priority=Priority.NORMAL,
    time_budget=None,
    delivery=Delivery(1, 0.0),
    cache=CacheUse(),
    seeded=False,
)


class Busy(AdmissionSlots):
    """Slots of which `running` are said to run, one number each time that it is asked."""

    def __init__(self, running: Iterator[int]) -> None:
        super().__init__(LimitOptions(), lambda: 2)
        self._running = running

    @property
    def running(self) -> int:
        return next(self._running)


class Made:
    """A generated answer over a script, and what became of it: the sink of its completion, too."""

    def __init__(
        self,
        script: Script,
        stops: tuple[str, ...] = (),
        batch: Delivery | None = None,
        running: Iterator[int] = ONE,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        self.engine = ScriptedEngine(script)
        self.slots = Busy(running)
        self.stops = stops
        self.whole: list[CachedCompletion] = []
        request = replace(plain_request((120,), 9), priority=priority)
        work = Generating(REQUEST, request, batch or Delivery(16, 0.02))
        self.answer = EngineAnswer(self.engine, self.slots, self, work, self)

    def take(self, completion: CachedCompletion) -> None:
        self.whole.append(completion)

    def text_maker(self, request: Request) -> Detokenizer:
        assert request is REQUEST
        return Detokenizer(Tokenizer.of_bytes(), self.stops)

    detokenizer = text_maker

    async def parts(self) -> list[AnswerPart]:
        found = [await self.answer.next()]
        assert found[0] is BEGUN
        assert self.slots.taken == 1
        try:
            while found[-1].ending is None:
                found.append(await self.answer.next())
        finally:
            self.answer.close()
        assert self.engine.stream.cancelled
        assert self.slots.taken == 0
        return found[1:]


def events(*tokens: bytes) -> Script:
    """One event each; the last is the end."""
    found = [TokenEvents(tuple(one), start=START if at == 0 else None) for at, one in enumerate(tokens)]
    found[-1] = TokenEvents(tuple(tokens[-1]), finish=FINISH, start=START if len(tokens) == 1 else None)
    return [(0.0, event) for event in found]


async def test_an_answer_ends_with_its_stop_string_ids_and_all() -> None:
    made = Made(events(b"ab", b"cdef", b"gh"), stops=("d",))
    first, last = await made.parts()
    assert (first.token_ids, first.text, first.ending) == (tuple(b"ab"), "ab", None)
    assert (last.token_ids, last.text) == (tuple(b"cd"), "c")
    assert last.ending == AnswerEnding(reason="stop_string", prompt_tokens=1, completion_tokens=4, stop_string="d")
    assert [whole.parts for whole in made.whole] == [(first, last)]
    assert made.answer.finish is None  # the engine's account is of more than was said


async def test_an_answer_that_ends_by_itself_is_the_engines() -> None:
    made = Made(events(b"ab", b"c"))
    await made.parts()
    (whole,) = made.whole
    assert whole.ending == END
    assert whole.max_tokens == 9
    assert (made.answer.start, made.answer.finish) == (START, FINISH)


async def test_what_breaks_off_is_whole_to_nobody() -> None:
    made = Made([(0.0, TokenEvents(tuple(b"ab"), start=START)), (0.0, EngineUnavailable("gone", 1.0))])
    with pytest.raises(EngineUnavailable):
        await made.parts()
    assert made.whole == []
    assert made.slots.taken == made.slots.waiting == 0


async def test_the_first_tokens_wait_for_nobody_and_later_ones_for_company_while_many_run() -> None:
    running = iter([MANY, MANY + 1, 256, 100_000, 3])
    asked = Delivery(1, 0.0, coalescing_delay=0.05)
    made = Made(events(*[b"a"] * 6), batch=asked, running=running)
    await made.parts()
    first, *later = made.engine.stream.batched
    assert first == (1, 0.0)
    assert [delay for _, delay in later] == [
        coalescing_delay(n, 0.05, False) for n in (MANY, MANY + 1, 256, 100_000, 3)
    ]
    assert [tokens for tokens, _ in later] == [1, MOST, MOST, MOST, 1]
    calm, stormed = (
        [coalescing_delay(n, 1.0, storm) for n in (MANY, MANY + 1, 256, 100_000)] for storm in (False, True)
    )
    assert calm == sorted(calm)
    assert 0 == calm[0] == stormed[0]
    assert all(short < long <= 0.2 for short, long in zip(calm[1:], stormed[1:], strict=True))
    assert coalescing_delay(256, 0.01, False) == coalescing_delay(256, 0.01, True) == 0.01, (
        "no longer than the caller lets it"
    )
    made = Made(events(*[b"a"] * 6), batch=Delivery(1, 0.0))
    await made.parts()
    assert made.engine.stream.batched == [(1, 0.0)], "who has set a size or a delay gets those"
    lively = Delivery(1, 0.0, coalescing_delay=0.05)
    made = Made(events(*[b"a"] * 6), batch=lively, running=repeat(100_000), priority=Priority.INTERACTIVE)
    await made.parts()
    assert set(made.engine.stream.batched) == {(1, 0.0)}, "nor does who is watched wait for company"


async def pieces(*parts: AnswerPart | Exception, pause: float = 0.0) -> AsyncIterator[AnswerPart]:
    for part in parts:
        await asyncio.sleep(pause)
        if isinstance(part, Exception):
            raise part
        yield part
        pause = 60.0 if pause else 0.0


def stream_of(
    *parts: AnswerPart | Exception, pause: float = 0.0, own: EngineAnswer | None = None, deadline: float | None = None
) -> SharedAnswer:
    return SharedAnswer(pieces(*parts, pause=pause), own, deadline)


ABC = AnswerPart(tuple(b"abc"), "abc", END, (1, 2))


async def test_the_one_it_is_generated_for_gets_the_engines_own_account() -> None:
    made = Made(events(b"abc"))
    await made.parts()
    own, others = stream_of(BEGUN, ABC, own=made.answer), stream_of(BEGUN, ABC, own=Made(events(b"abc")).answer)
    for stream in (own, others):
        await stream.opened()
    assert await own.next() == await others.next() == ABC
    assert (own.generated, own.start, own.finish) == (True, START, FINISH)
    assert (others.generated, others.start, others.finish) == (False, None, None)


async def test_a_source_that_says_nothing_beforehand_loses_nothing() -> None:
    stream = stream_of(AnswerPart(tuple(b"a"), "a"), ABC)
    await stream.opened()
    assert [part.token_ids for part in (await stream.next(), await stream.next())] == [tuple(b"a"), tuple(b"abc")]


@pytest.mark.parametrize(
    ("error", "expected"),
    [(LeaderRefused(DeadlineExceeded("late")), DeadlineExceeded), (Unfinished("half"), EngineUnavailable)],
)
async def test_what_the_source_meets_reaches_the_caller_in_the_engines_words(
    error: Exception, expected: type[Exception]
) -> None:
    with pytest.raises(expected):
        await stream_of(error).opened()


async def read(stream: SharedAnswer) -> AnswerPart:
    await stream.opened()
    return await stream.next()


async def waiting(stream: SharedAnswer) -> asyncio.Task[AnswerPart]:
    task = asyncio.ensure_future(read(stream))
    await asyncio.sleep(0)
    return task


async def test_an_abort_ends_one_reader_in_the_middle_and_at_once() -> None:
    stream = stream_of(ABC, pause=60.0)
    task = await waiting(stream)
    stream.abort("enough")
    with pytest.raises(Aborted, match="enough"):
        await asyncio.wait_for(task, 60)
    with pytest.raises(Aborted, match="enough"):
        await stream.next()


async def test_a_caller_that_leaves_while_it_is_aborted_has_left() -> None:
    stream = stream_of(ABC, pause=60.0)
    task = await waiting(stream)
    stream.abort("enough")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_a_deadline_passes_while_it_waits() -> None:
    loop = asyncio.get_running_loop()
    stream = stream_of(ABC, pause=60.0, deadline=loop.time() + 0.02)
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(read(stream), 60)
    early = stream_of(ABC, deadline=loop.time() + 0.02)
    assert (await read(early)).ending is not None
    early.close()
