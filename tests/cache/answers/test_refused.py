"""Readers who may not generate: each is told so for itself, and the next one's way is tried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.answers.single_flight import SingleFlight
from cache.api import BEGUN, AnswerPart, Generate, LeaderRefused
from cache.open.counters import Counters
from tests.cache.answers.one_answer import KEY, TEXT, Letters, Model, ask, read
from tests.cache.answers.test_cross_process import LONG, Make, make_shared, until
from tests.cache.answers.test_single_flight import flights

__all__ = ["flights", "make_shared"]  # fixtures


class NoPlaceError(Exception):
    """Why it may not."""


class Refusing:
    """May not generate."""

    def __init__(self, number: int) -> None:
        self._number = number

    async def next(self) -> AnswerPart:
        await asyncio.sleep(0)
        raise LeaderRefused(NoPlaceError(self._number))

    def close(self) -> None:
        pass


class Announcing(Letters):
    """Says that it was let in, and waits for a gate."""

    def __init__(self, model: Model, gate: asyncio.Event | None) -> None:
        super().__init__(model)
        self._gate = gate
        self._announced = False

    async def next(self) -> AnswerPart:
        if not self._announced:
            self._announced = True
            return BEGUN
        if self._gate is not None:
            await self._gate.wait()
        return await super().next()


def refusing(number: int = 0) -> Generate:
    return lambda: Refusing(number)


def announcing(model: Model, gate: asyncio.Event | None = None) -> Generate:
    return lambda: Announcing(model, gate)


async def told(flights: SingleFlight, generate: Generate) -> str:
    """The answer, or why there is none."""
    try:
        return await ask(flights, generate)
    except LeaderRefused as refused:
        return repr(refused.reason)


@pytest.mark.product
@given(st.lists(st.sampled_from(["refused", "dies", "answers"]), min_size=1, max_size=8))
def test_every_reader_gets_the_answer_or_its_own_refusal(ways: list[str]) -> None:
    """Refusals use up no attempts; two failures end the flight for those who were not refused."""

    async def run() -> list[object]:
        flights, models = SingleFlight(Counters(), linger=0.0), [Model(pause=0, dies_after=0) for _ in ways]
        made = {
            "refused": lambda number: refusing(number),
            "dies": lambda number: models[number].generate,
            "answers": lambda number: Model(pause=0).generate,
        }
        tasks = [asyncio.ensure_future(told(flights, made[way](number))) for number, way in enumerate(ways)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert len(flights) == 0
        return found

    found = asyncio.run(run())
    led, dead = 0, 0
    while led < len(ways) and dead < 2 and (not led or ways[led - 1] != "answers"):
        dead += ways[led] == "dies"
        led += 1
    answered = "answers" in ways[:led]
    for number, (way, what) in enumerate(zip(ways, found, strict=True)):
        if way == "refused" and number < led:
            assert what == f"NoPlaceError({number})"
        elif answered:
            assert what == TEXT
        else:
            assert isinstance(what, RuntimeError)


async def test_the_next_in_line_generates_for_the_rest(flights: SingleFlight, counters: Counters) -> None:
    model = Model()
    ways = [refusing(1), refusing(2), *([model.generate] * 50)]
    found = await asyncio.gather(*(told(flights, way) for way in ways))
    assert found == ["NoPlaceError(1)", "NoPlaceError(2)", *([TEXT] * 50)]
    assert model.started == 1
    assert counters.counts().get(("flight_replaced", ""), 0) == 0


async def test_where_all_are_refused_the_next_question_begins_anew(flights: SingleFlight) -> None:
    found = await asyncio.gather(*(told(flights, refusing(number)) for number in range(100)))
    assert found == [f"NoPlaceError({number})" for number in range(100)]
    assert await ask(flights, Model().generate) == TEXT


async def test_who_was_let_in_is_known_before_anything_is_generated(flights: SingleFlight) -> None:
    gate, model = asyncio.Event(), Model()
    async with (
        flights.join(KEY, announcing(model, gate)) as leader,
        flights.join(KEY, refusing()) as follower,
    ):
        for parts in (leader, follower):
            assert await asyncio.wait_for(anext(parts), 60) is BEGUN
        gate.set()
        assert [await read(parts) for parts in (leader, follower)] == [TEXT] * 2
        async with flights.join(KEY, refusing()) as late:
            first = await anext(late)
            assert first is not BEGUN
            assert first.text


async def test_a_replacement_begins_without_a_word(flights: SingleFlight) -> None:
    dying, healthy = Model(dies_after=9), Model(step=5)
    async with flights.join(KEY, announcing(dying)) as one, flights.join(KEY, announcing(healthy)) as other:
        assert await anext(one) is BEGUN
        for parts in (one, other):  # the other one comes when there is more to be told
            found = [part async for part in parts]
            assert "".join(part.text for part in found) == TEXT
            assert not any(part is BEGUN for part in found)


async def test_a_refused_leader_lets_another_replica_lead(
    make_shared: Make, make_flights: Callable[[], SingleFlight], counters: Counters
) -> None:
    leading, gate, model = asyncio.Event(), asyncio.Event(), Model()

    class RefusedLate(Refusing):
        async def next(self) -> AnswerPart:
            leading.set()
            await gate.wait()
            return await super().next()

    full, free = (make_flights(), make_shared(settings=LONG)), (make_flights(), make_shared(settings=LONG))
    first = asyncio.ensure_future(told(full[0], lambda: full[1].generation(KEY, lambda: RefusedLate(7))))
    await asyncio.wait_for(leading.wait(), 60)
    second = asyncio.ensure_future(told(free[0], lambda: free[1].generation(KEY, announcing(model))))
    await until(lambda: counters.counts().get(("flight_shared", "follow")))
    gate.set()
    # Neither the lease nor anybody's patience ends so soon.
    assert await asyncio.wait_for(second, LONG.patience / 2) == TEXT
    assert await first == "NoPlaceError(7)"
    assert model.started == 1


async def test_who_reads_along_with_another_replica_needs_no_place(
    make_shared: Make, make_flights: Callable[[], SingleFlight], counters: Counters
) -> None:
    model, gate = Model(), asyncio.Event()
    full, free = (make_flights(), make_shared()), (make_flights(), make_shared())
    leader = asyncio.ensure_future(ask(free[0], lambda: free[1].generation(KEY, announcing(model, gate))))
    await until(lambda: counters.counts().get(("flight_shared", "lead")))
    async with full[0].join(KEY, lambda: full[1].generation(KEY, refusing())) as parts:
        assert await asyncio.wait_for(anext(parts), 60) is BEGUN
        gate.set()
        assert await read(parts) == TEXT
    assert await leader == TEXT
    assert model.started == 1


@pytest.fixture
async def make_flights(counters: Counters) -> AsyncIterator[Callable[[], SingleFlight]]:
    made: list[SingleFlight] = []

    def make() -> SingleFlight:
        made.append(SingleFlight(counters, linger=600))
        return made[-1]

    yield make
    for one in made:
        one.close()
