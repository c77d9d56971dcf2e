"""Identical requests at once, on one replica: one generation, whoever leaves, whoever dies."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.answers.resume import Skipper, resume
from cache.answers.single_flight import SingleFlight
from cache.api import AnswerPart, CacheKey, Diverged, EntryKind, Generation, Unfinished
from cache.open.counters import Counters
from tests.cache.answers.one_answer import END, KEY, TEXT, Model, ask
from tests.cache.waiting import until

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def flights(counters: Counters) -> AsyncIterator[SingleFlight]:
    made = SingleFlight(counters, linger=600)
    yield made
    made.close()


class Endless:
    """So many parts, and counts those that were made."""

    def __init__(self, parts: int) -> None:
        self.made = 0
        self._parts = parts

    async def next(self) -> AnswerPart:
        self.made += 1
        return AnswerPart((7,), "x") if self.made < self._parts else AnswerPart((), "", END)

    def close(self) -> None:
        pass


async def test_a_generation_waits_for_its_furthest_reader_and_for_no_other(flights: SingleFlight) -> None:
    source = Endless(300)

    async with flights.join(KEY, lambda: source) as slow, asyncio.timeout(60):
        assert (await anext(slow)).text == "x"
        await asyncio.sleep(0.1)
        assert source.made == 1  # nobody reads on, so no request generates on
        async with flights.join(KEY, lambda: source) as fast:
            assert len([part async for part in fast]) == 300
        assert len([part async for part in slow]) == 299
        assert source.made == 300


async def test_a_reader_who_leaves_while_it_fetches_loses_no_part(flights: SingleFlight) -> None:
    """The one who waits for its fetch goes on where it was."""
    model = Model(step=1, pause=0.002)
    stays = asyncio.ensure_future(ask(flights, model.generate))
    for _ in range(5):
        leaves = asyncio.ensure_future(ask(flights, model.generate))
        await asyncio.sleep(0.007)
        leaves.cancel()
    assert await stays == TEXT
    assert (model.started, model.closed) == (1, 1)


async def test_a_candidate_that_leaves_before_its_turn_is_passed_over(flights: SingleFlight) -> None:
    dying, unused = Model(step=3, pause=0, dies_after=3), Model()
    async with flights.join(KEY, dying.generate) as leader:
        async with flights.join(KEY, unused.generate):
            assert (await anext(leader)).text == TEXT[:3]
        with pytest.raises(RuntimeError, match="the engine died"):
            await anext(leader)
    assert unused.started == 0


async def test_a_hundred_at_once_are_one_generation(flights: SingleFlight) -> None:
    model = Model()
    assert await asyncio.gather(*(ask(flights, model.generate) for _ in range(100))) == [TEXT] * 100
    assert (model.started, model.closed) == (1, 1)


async def test_other_questions_fly_apart(flights: SingleFlight) -> None:
    one, two = Model(), Model()
    other = CacheKey(EntryKind.RESPONSE, "cd" * 16, "0" * 64)
    await asyncio.gather(ask(flights, one.generate), ask(flights, two.generate, other))
    assert (one.started, two.started) == (1, 1)


async def test_a_follower_attaches_mid_stream_and_gets_all(flights: SingleFlight) -> None:
    model = Model()
    first = asyncio.ensure_future(ask(flights, model.generate))
    await asyncio.sleep(0.02)
    assert await ask(flights, model.generate) == await first == TEXT
    assert model.started == 1


async def test_who_comes_just_after_the_end_gets_it(flights: SingleFlight) -> None:
    model = Model(pause=0)
    await ask(flights, model.generate)
    assert await ask(flights, model.generate) == TEXT
    assert model.started == 1


async def test_who_comes_later_generates(counters: Counters) -> None:
    flights, model = SingleFlight(counters, linger=0.02), Model(pause=0)
    await ask(flights, model.generate)
    await until(lambda: asyncio.sleep(0, len(flights) == 0))
    await ask(flights, model.generate)
    assert model.started == 2
    flights.close()


async def test_a_leader_whose_client_leaves_goes_on_for_the_others(flights: SingleFlight) -> None:
    model = Model()
    leader = asyncio.ensure_future(ask(flights, model.generate))
    await asyncio.sleep(0.012)
    followers = [asyncio.ensure_future(ask(flights, model.generate)) for _ in range(3)]
    await asyncio.sleep(0.005)
    leader.cancel()
    assert await asyncio.gather(*followers) == [TEXT] * 3
    assert model.started == 1
    assert leader.cancelled()


async def test_the_generation_ends_with_its_last_reader(flights: SingleFlight) -> None:
    model = Model(pause=0.02)
    readers = [asyncio.ensure_future(ask(flights, model.generate)) for _ in range(3)]
    await asyncio.sleep(0.03)
    for reader in readers:
        reader.cancel()
    await asyncio.wait(readers)
    assert (model.started, model.finished, model.closed) == (1, 0, 1)
    assert len(flights) == 0
    assert await ask(flights, Model().generate) == TEXT


async def test_a_leader_that_dies_is_replaced_where_it_stood(flights: SingleFlight, counters: Counters) -> None:
    dying, healthy = Model(dies_after=12), Model(step=7)
    leader = asyncio.ensure_future(ask(flights, dying.generate))
    await asyncio.sleep(0)
    follower = asyncio.ensure_future(ask(flights, healthy.generate))
    assert await asyncio.gather(leader, follower) == [TEXT, TEXT]
    assert (dying.started, healthy.started) == (1, 1)
    assert counters.counts()["flight_replaced", ""] == 1


async def test_if_the_replacement_dies_too_all_are_told(flights: SingleFlight) -> None:
    models = [Model(dies_after=6 * i) for i in range(1, 4)]
    readers = [asyncio.ensure_future(ask(flights, model.generate)) for model in models]
    outcomes = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [RuntimeError] * 3
    assert [model.started for model in models] == [1, 1, 0]
    assert await ask(flights, Model().generate) == TEXT


async def test_a_leader_alone_that_dies_says_why(flights: SingleFlight) -> None:
    with pytest.raises(RuntimeError, match="the engine died"):
        await ask(flights, Model(dies_after=0).generate)


async def test_a_source_that_just_ends_is_no_answer(flights: SingleFlight) -> None:
    class Broken(Endless):
        async def next(self) -> AnswerPart:
            if self.made == 1:
                raise StopAsyncIteration
            return await super().next()

    with pytest.raises(Unfinished):
        await ask(flights, lambda: Broken(9))


async def test_closing_tells_readers(counters: Counters) -> None:
    flights = SingleFlight(counters)
    reader = asyncio.ensure_future(ask(flights, Model(pause=1).generate))
    await asyncio.sleep(0.01)
    flights.close()
    with pytest.raises(Unfinished):
        await reader


async def test_a_slow_reader_holds_nobody_up(flights: SingleFlight) -> None:
    model = Model(pause=0)
    async with flights.join(KEY, model.generate) as slow:
        first = await anext(slow)
        assert await asyncio.wait_for(ask(flights, model.generate), 60) == TEXT
        assert first.text + "".join([part.text async for part in slow]) == TEXT
    assert model.started == 1


async def test_who_comes_when_the_last_has_just_left_gets_a_generation_of_its_own(flights: SingleFlight) -> None:
    left, fresh = Model(), Model()
    async with flights.join(KEY, left.generate) as parts:
        assert (await anext(parts)).text
    assert await ask(flights, fresh.generate) == TEXT  # the other is cancelled, and does not know it yet
    assert (left.started, left.finished, fresh.started) == (1, 0, 1)


async def test_a_flush_forgets_what_is_over_and_nothing_on_its_way(flights: SingleFlight, counters: Counters) -> None:
    done, under_way = Model(pause=0), Model(pause=0)
    other = CacheKey(EntryKind.RESPONSE, "cd" * 16, "0" * 64)
    await ask(flights, done.generate)
    async with flights.join(other, under_way.generate) as parts:
        assert (await anext(parts)).text
        flights.forget_finished()
        assert await ask(flights, under_way.generate, other) == TEXT
        assert under_way.started == 1
    assert await ask(flights, done.generate) == TEXT
    assert done.started == 2


CUTS = st.lists(st.integers(0, len(TEXT)), max_size=6).map(lambda cuts: sorted({0, *cuts, len(TEXT)}))


def pieces(cuts: list[int], text: str = TEXT) -> list[AnswerPart]:
    """With text a little behind the ids, as a detokenizer leaves it."""
    parts = [(text[a:b], text[max(0, a - 2) : max(0, b - 2)]) for a, b in itertools.pairwise(cuts)]
    found = [AnswerPart(tuple(map(ord, ids)), late) for ids, late in parts]
    return [*found, AnswerPart((), text[len(text) - 2 :], END)]


@given(CUTS, CUTS, st.integers(0, 6))
@settings(deadline=None)
def test_resuming_anywhere_gives_the_same_answer(first: list[int], second: list[int], taken: int) -> None:
    delivered = [part for part in pieces(first)[:taken] if part.ending is None]
    skipper = Skipper(delivered)
    rest = [new for part in pieces(second) if (new := skipper.rest(part)) is not None]
    whole = delivered + rest
    assert "".join(part.text for part in whole) == TEXT
    assert [i for part in whole for i in part.token_ids] == [ord(letter) for letter in TEXT]
    assert [part.ending for part in whole if part.ending] == [END]


@pytest.mark.parametrize("other", ["the hole answer, word by word", "the", TEXT[:20]])
async def test_a_replacement_that_says_something_else_is_refused(other: str) -> None:
    async def fresh() -> AsyncGenerator[AnswerPart, None]:
        yield AnswerPart(tuple(map(ord, other)), other)
        yield AnswerPart((), "", END)

    delivered = [AnswerPart(tuple(map(ord, TEXT[:25])), TEXT[:25])]
    with pytest.raises(Diverged):
        async with aclosing(resume(delivered, fresh())) as rest:
            [part async for part in rest]


async def test_an_answer_that_was_read_waits_for_no_collection(counters: Counters) -> None:
    """A call's objects hang on its leader: thousands of them would wait for each other."""
    flights, model = SingleFlight(counters, linger=0.02), Model(pause=0)
    generations: list[weakref.ref[Generation]] = []

    def generate() -> Generation:
        made = model.generate()
        generations.append(weakref.ref(made))
        return made

    gc.disable()
    try:
        assert [await ask(flights, generate), await ask(flights, generate)] == [TEXT, TEXT]
        await until(lambda: asyncio.sleep(0, len(flights) == 0))
        assert [one() for one in generations] == [None]
    finally:
        gc.enable()
