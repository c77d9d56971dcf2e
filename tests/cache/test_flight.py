"""Identical requests at once: one generation, whoever leaves, whoever dies, on one replica and across two."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.api import CacheKey, Chunk, Ending, Kind
from cache.counters import Counters
from cache.envelope import Envelope
from cache.flight import AHEAD, Flights, Generate
from cache.keyring import Keyring
from cache.lease import Leases
from cache.redis_link import Link
from cache.resume import Diverged, Skipper, Unfinished, resume
from cache.settings import FlightSettings, RedisSettings
from cache.shared_flight import SharedFlights

KEY = CacheKey(Kind.RESPONSE, "ab" * 16, "0" * 64)
TEXT = "the whole answer, word by word"
END = Ending(reason="stop", prompt_tokens=3, completion_tokens=len(TEXT))
QUICK = FlightSettings(lease=0.4, heartbeat=0.1, patience=1.0, retention=5.0)


class Model:
    """Generates TEXT, a token a letter, `step` letters a message; may die on the way."""

    def __init__(self, step: int = 3, pause: float = 0.005, dies_after: int | None = None, text: str = TEXT) -> None:
        self.step, self.pause, self.dies_after, self.text = step, pause, dies_after, text
        self.started = self.finished = self.closed = 0

    async def generate(self) -> AsyncGenerator[Chunk, None]:
        self.started += 1
        try:
            for at in range(0, len(self.text), self.step):
                if self.dies_after is not None and at >= self.dies_after:
                    raise RuntimeError("the engine died")
                await asyncio.sleep(self.pause)
                part = self.text[at : at + self.step]
                yield Chunk(tuple(map(ord, part)), part)
            self.finished += 1
            yield Chunk((), "", END)
        finally:
            self.closed += 1


async def read(chunks: AsyncIterator[Chunk]) -> str:
    found = [chunk async for chunk in chunks]
    assert found[-1].ending == END
    assert all(chunk.ending is None for chunk in found[:-1])
    text = "".join(chunk.text for chunk in found)
    assert [i for chunk in found for i in chunk.token_ids] == [ord(letter) for letter in text]
    return text


async def ask(flights: Flights, generate: Generate, key: CacheKey = KEY) -> str:
    async with flights.join(key, generate) as chunks:
        return await read(chunks)


@pytest.fixture
async def flights(counters: Counters) -> AsyncIterator[Flights]:
    made = Flights(counters, linger=0.05)
    yield made
    await made.aclose()


async def test_a_generation_waits_for_its_furthest_reader_and_for_no_other(flights: Flights) -> None:
    made = 0

    async def endless() -> AsyncGenerator[Chunk, None]:
        nonlocal made
        while made < 3 * AHEAD - 1:
            made += 1
            yield Chunk((7,), "x")
        yield Chunk((), "", END)

    async with flights.join(KEY, endless) as slow, asyncio.timeout(20):
        assert (await anext(slow)).text == "x"
        await asyncio.sleep(0.1)
        assert AHEAD <= made <= AHEAD + 2  # nobody reads on, so nobody generates on
        async with flights.join(KEY, endless) as fast:
            assert len([chunk async for chunk in fast]) == 3 * AHEAD
        assert len([chunk async for chunk in slow]) == 3 * AHEAD - 1


async def test_a_hundred_at_once_are_one_generation(flights: Flights) -> None:
    model = Model()
    assert await asyncio.gather(*(ask(flights, model.generate) for _ in range(100))) == [TEXT] * 100
    assert (model.started, model.closed) == (1, 1)


async def test_other_questions_fly_apart(flights: Flights) -> None:
    one, two = Model(), Model()
    other = CacheKey(Kind.RESPONSE, "cd" * 16, "0" * 64)
    await asyncio.gather(ask(flights, one.generate), ask(flights, two.generate, other))
    assert (one.started, two.started) == (1, 1)


async def test_a_follower_attaches_mid_stream_and_gets_all(flights: Flights) -> None:
    model = Model()
    first = asyncio.ensure_future(ask(flights, model.generate))
    await asyncio.sleep(0.02)
    assert await ask(flights, model.generate) == await first == TEXT
    assert model.started == 1


async def test_who_comes_just_after_the_end_gets_it_and_later_ones_generate(flights: Flights) -> None:
    model = Model(pause=0)
    await ask(flights, model.generate)
    assert await ask(flights, model.generate) == TEXT
    assert model.started == 1
    await asyncio.sleep(0.15)
    assert len(flights) == 0
    await ask(flights, model.generate)
    assert model.started == 2


async def test_a_leader_whose_client_leaves_goes_on_for_the_others(flights: Flights) -> None:
    model = Model()
    leader = asyncio.ensure_future(ask(flights, model.generate))
    await asyncio.sleep(0.012)
    followers = [asyncio.ensure_future(ask(flights, model.generate)) for _ in range(3)]
    await asyncio.sleep(0.005)
    leader.cancel()
    assert await asyncio.gather(*followers) == [TEXT] * 3
    assert model.started == 1
    assert leader.cancelled()


async def test_the_generation_ends_with_its_last_reader(flights: Flights) -> None:
    model = Model(pause=0.02)
    readers = [asyncio.ensure_future(ask(flights, model.generate)) for _ in range(3)]
    await asyncio.sleep(0.03)
    for reader in readers:
        reader.cancel()
    await asyncio.wait(readers)
    await asyncio.sleep(0.05)
    assert (model.started, model.finished, model.closed) == (1, 0, 1)
    assert len(flights) == 0
    assert await ask(flights, Model().generate) == TEXT


async def test_a_leader_that_dies_is_replaced_where_it_stood(flights: Flights, counters: Counters) -> None:
    dying, healthy = Model(dies_after=12), Model(step=7)
    leader = asyncio.ensure_future(ask(flights, dying.generate))
    await asyncio.sleep(0)
    follower = asyncio.ensure_future(ask(flights, healthy.generate))
    assert await asyncio.gather(leader, follower) == [TEXT, TEXT]
    assert (dying.started, healthy.started) == (1, 1)
    assert counters.counts()["flight_replaced", ""] == 1


async def test_if_the_replacement_dies_too_all_are_told(flights: Flights) -> None:
    models = [Model(dies_after=6 * i) for i in range(1, 4)]
    readers = [asyncio.ensure_future(ask(flights, model.generate)) for model in models]
    outcomes = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [RuntimeError] * 3
    assert [model.started for model in models] == [1, 1, 0]
    assert await ask(flights, Model().generate) == TEXT


async def test_a_leader_alone_that_dies_says_why(flights: Flights) -> None:
    with pytest.raises(RuntimeError, match="the engine died"):
        await ask(flights, Model(dies_after=0).generate)


async def test_a_source_that_just_ends_is_no_answer(flights: Flights) -> None:
    async def generate() -> AsyncGenerator[Chunk, None]:
        yield Chunk((1,), "x")

    with pytest.raises(Unfinished):
        await ask(flights, generate)


async def test_closing_tells_readers(counters: Counters) -> None:
    flights = Flights(counters)
    reader = asyncio.ensure_future(ask(flights, Model(pause=1).generate))
    await asyncio.sleep(0.01)
    await flights.aclose()
    with pytest.raises(Unfinished):
        await reader


async def test_a_slow_reader_holds_nobody_up(flights: Flights) -> None:
    model = Model(pause=0)

    async def slowly() -> str:
        async with flights.join(KEY, model.generate) as chunks:
            text = ""
            async for chunk in chunks:
                text += chunk.text
                await asyncio.sleep(0.03)
            return text

    slow = asyncio.ensure_future(slowly())
    await asyncio.wait_for(ask(flights, model.generate), 0.2)
    assert not slow.done()
    assert await slow == TEXT


CUTS = st.lists(st.integers(0, len(TEXT)), max_size=6).map(lambda cuts: sorted({0, *cuts, len(TEXT)}))


def pieces(cuts: list[int], text: str = TEXT) -> list[Chunk]:
    """With text a little behind the ids, as a detokenizer leaves it."""
    parts = [(text[a:b], text[max(0, a - 2) : max(0, b - 2)]) for a, b in itertools.pairwise(cuts)]
    found = [Chunk(tuple(map(ord, ids)), late) for ids, late in parts]
    return [*found, Chunk((), text[len(text) - 2 :], END)]


@given(CUTS, CUTS, st.integers(0, 6))
@settings(deadline=None)
def test_resuming_anywhere_gives_the_same_answer(first: list[int], second: list[int], taken: int) -> None:
    delivered = [chunk for chunk in pieces(first)[:taken] if chunk.ending is None]
    skipper = Skipper(delivered)
    rest = [part for chunk in pieces(second) if (part := skipper.rest(chunk)) is not None]
    whole = delivered + rest
    assert "".join(chunk.text for chunk in whole) == TEXT
    assert [i for chunk in whole for i in chunk.token_ids] == [ord(letter) for letter in TEXT]
    assert [chunk.ending for chunk in whole if chunk.ending] == [END]


@pytest.mark.parametrize("other", ["the hole answer, word by word", "the", TEXT[:20]])
async def test_a_replacement_that_says_something_else_is_refused(other: str) -> None:
    async def fresh() -> AsyncGenerator[Chunk, None]:
        yield Chunk(tuple(map(ord, other)), other)
        yield Chunk((), "", END)

    delivered = [Chunk(tuple(map(ord, TEXT[:25])), TEXT[:25])]
    with pytest.raises(Diverged):
        async with aclosing(resume(delivered, fresh())) as rest:
            [chunk async for chunk in rest]


async def ended(task: asyncio.Future[str]) -> None:
    task.cancel()
    await asyncio.wait([task])


Make = Callable[..., SharedFlights]


@pytest.fixture
async def make_shared(redis_server: Any, keyring: Keyring, counters: Counters) -> AsyncIterator[Make]:
    links: list[Link] = []
    made: list[SharedFlights] = []

    def make(url: str = redis_server.url, settings: FlightSettings = QUICK, budget: float = 1.0) -> SharedFlights:
        redis = RedisSettings(url=url)
        pair = (Link(redis, budget, "small", counters), Link(redis, budget, "flight", counters))
        links.extend(pair)
        made.append(SharedFlights(Leases(*pair, settings), Envelope(keyring, 1 << 20, counters), settings, counters))
        return made[-1]

    yield make
    for shared in made:
        await shared.aclose()
    for link in links:
        await link.aclose()


async def fly(shared: SharedFlights, model: Model) -> str:
    async with aclosing(shared.around(KEY, model.generate)) as chunks:
        return await read(chunks)


async def test_two_replicas_are_one_generation(make_shared: Make, counters: Counters) -> None:
    model = Model(pause=0.01)
    replicas = [(Flights(counters), make_shared()) for _ in range(2)]

    async def one(number: int) -> str:
        flights, shared = replicas[number % 2]
        return await ask(flights, lambda: shared.around(KEY, model.generate))

    assert await asyncio.gather(*(one(number) for number in range(100))) == [TEXT] * 100
    assert model.started == 1
    for flights, _ in replicas:
        await flights.aclose()


async def test_who_comes_to_another_replica_just_after_reads_the_finished_stream(make_shared: Make) -> None:
    model = Model(pause=0)
    assert await fly(make_shared(), model) == TEXT
    await asyncio.sleep(0.05)
    assert await fly(make_shared(), model) == TEXT
    assert model.started == 1


async def test_a_replica_that_dies_is_replaced_by_a_follower(make_shared: Make, redis_server: Any) -> None:
    dying, healthy = Model(pause=0.3), Model(step=7, pause=0.001)
    leader_side = make_shared()
    leader = asyncio.ensure_future(fly(leader_side, dying))
    await asyncio.sleep(0.05)
    follower = asyncio.ensure_future(fly(make_shared(), healthy))
    await asyncio.sleep(0.05)
    await leader_side.aclose()  # as a killed process: nothing is published or renewed any more
    assert await asyncio.wait_for(follower, 3) == TEXT
    assert healthy.started == 1
    await ended(leader)


async def test_a_leader_that_fails_lets_a_follower_take_over_at_once(make_shared: Make) -> None:
    dying, healthy = Model(pause=0.1, dies_after=9), Model(step=7, pause=0.001)
    slow = FlightSettings(lease=30.0, heartbeat=5.0, patience=20.0)
    leader = asyncio.ensure_future(fly(make_shared(settings=slow), dying))
    await asyncio.sleep(0.03)
    follower = asyncio.ensure_future(fly(make_shared(settings=slow), healthy))
    with pytest.raises(RuntimeError):
        await leader
    assert await asyncio.wait_for(follower, 2) == TEXT


async def test_a_silent_leader_is_waited_for_so_long_and_no_longer(make_shared: Make) -> None:
    hung, healthy = Model(pause=60), Model(pause=0)
    leader = asyncio.ensure_future(fly(make_shared(), hung))
    await asyncio.sleep(0.05)
    begun = asyncio.get_running_loop().time()
    assert await fly(make_shared(), healthy) == TEXT
    assert 0.9 < asyncio.get_running_loop().time() - begun < 3
    await ended(leader)


async def test_a_dead_redis_means_generating_alone(make_redis: Callable[..., Any], make_shared: Make) -> None:
    shared = make_shared(make_redis(started=False).url)
    model = Model(pause=0)
    assert await asyncio.gather(*(fly(shared, model) for _ in range(5))) == [TEXT] * 5
    assert model.started == 5


async def test_redis_stalls_in_mid_flight_and_both_finish(make_redis: Callable[..., Any], make_shared: Make) -> None:
    server = make_redis()
    lead, follow = Model(pause=0.01), Model(step=7, pause=0.001)
    leader = asyncio.ensure_future(fly(make_shared(server.url, budget=0.1), lead))
    await asyncio.sleep(0.04)
    follower = asyncio.ensure_future(fly(make_shared(server.url, budget=0.1), follow))
    await asyncio.sleep(0.02)
    server.pause()
    assert await asyncio.wait_for(asyncio.gather(leader, follower), 3) == [TEXT, TEXT]


async def test_a_forged_stream_is_not_followed(
    redis_server: Any, make_shared: Make, keyring: Keyring, counters: Counters
) -> None:
    token = "f" * 32
    redis_server.command("SET", f"l:{KEY.partition}:{KEY.digest}", token)
    redis_server.command("XADD", f"f:{KEY.partition}:{KEY.digest}{token}", "*", "c", "lies")
    model = Model(pause=0)
    assert await fly(make_shared(), model) == TEXT
    assert model.started == 1
    redis_server.command("SET", f"l:{KEY.partition}:{KEY.digest}", "no token")
    assert await fly(make_shared(), model) == TEXT
    assert model.started == 2


async def test_a_message_left_out_of_a_stream_is_noticed(
    redis_server: Any, make_shared: Make, keyring: Keyring, counters: Counters
) -> None:
    model = Model(pause=0.01)
    await fly(make_shared(), model)
    await asyncio.sleep(0.05)
    token = redis_server.command("GET", f"l:{KEY.partition}:{KEY.digest}").split(b"\r\n")[1].decode()
    stream = f"f:{KEY.partition}:{KEY.digest}{token}"
    entry = redis_server.command("XRANGE", stream, "-", "+", "COUNT", "2").split(b"\r\n")
    ids = [part.decode() for part in entry if part.count(b"-") == 1 and part.replace(b"-", b"").isdigit()]
    assert redis_server.command("XDEL", stream, ids[1]) == b":1\r\n"
    assert await fly(make_shared(), model) == TEXT
    assert model.started == 2


def test_a_lease_must_outlive_its_heartbeat() -> None:
    with pytest.raises(ValueError, match="two heartbeats"):
        FlightSettings(lease=1.0, heartbeat=0.6)
