"""Identical requests at once, on two replicas: one generation, whatever becomes of Redis or of who leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any

import pytest

from cache.answers.codec import pack_part
from cache.answers.cross_process import INDEX, CrossProcess
from cache.answers.lease import Lease, Leases
from cache.answers.single_flight import SingleFlight
from cache.api import CacheKey, EntryKind, RedisSettings, SingleFlightSettings, StoreFault
from cache.open.counters import Counters
from cache.seal.envelope import Envelope
from cache.seal.keyring import Keyring
from cache.store.redis_link import RedisLink
from cache.store.redis_open import RedisEndpoint
from tests.cache.answers.one_answer import END, KEY, TEXT, Model, ask, read, spelled
from tests.waiting import until

QUICK = SingleFlightSettings(lease=0.4, heartbeat=0.1, patience=1.0, retention=5.0)
LONG = SingleFlightSettings(lease=300.0, heartbeat=30.0, patience=200.0, retention=300.0)


async def ended(task: asyncio.Future[str]) -> None:
    task.cancel()
    await asyncio.wait([task])


Make = Callable[..., CrossProcess]


@pytest.fixture
async def make_shared(redis_server: Any, keyring: Keyring, counters: Counters) -> AsyncIterator[Make]:
    links: list[RedisLink] = []
    made: list[CrossProcess] = []

    def make(
        url: str = redis_server.url, settings: SingleFlightSettings = QUICK, budget: float = 20.0, most: int = 1 << 20
    ) -> CrossProcess:
        server = RedisEndpoint(RedisSettings(url=url))
        pair = (RedisLink(server, budget, "small", counters), RedisLink(server, budget, "flight", counters))
        links.extend(pair)
        made.append(CrossProcess(Leases(*pair, settings), Envelope(keyring, most, counters), settings, counters))
        return made[-1]

    yield make
    for shared in made:
        await shared.aclose()
    for link in links:
        await link.aclose()


async def fly(shared: CrossProcess, model: Model) -> str:
    async with aclosing(shared.around(KEY, model.generate)) as parts:
        return await read(parts)


async def test_two_replicas_are_one_generation(make_shared: Make, counters: Counters) -> None:
    model = Model(pause=0.01)
    replicas = [(SingleFlight(counters), make_shared(settings=LONG)) for _ in range(2)]

    async def one(number: int) -> str:
        flights, shared = replicas[number % 2]
        return await ask(flights, lambda: shared.generation(KEY, model.generate))

    assert await asyncio.gather(*(one(number) for number in range(100))) == [TEXT] * 100
    assert model.started == 1
    for flights, _ in replicas:
        flights.close()


async def test_who_comes_to_another_replica_just_after_reads_the_finished_stream(make_shared: Make) -> None:
    model = Model(pause=0)
    assert await fly(make_shared(settings=LONG), model) == TEXT
    assert await fly(make_shared(settings=LONG), model) == TEXT
    assert model.started == 1


async def test_a_replica_that_dies_is_replaced_by_a_follower(make_shared: Make, counters: Counters) -> None:
    dying, healthy = Model(pause=0.3), Model(step=7, pause=0.001)
    leader_side = make_shared()
    leader = asyncio.ensure_future(fly(leader_side, dying))
    await until(lambda: dying.started)
    follower = asyncio.ensure_future(fly(make_shared(), healthy))
    await until(lambda: counters.counts().get(("flight_shared", "follow")))
    await leader_side.aclose()  # as a killed process: nothing is published or renewed any more
    assert await asyncio.wait_for(follower, 60) == TEXT
    assert healthy.started == 1
    await ended(leader)


async def test_a_leader_that_fails_lets_a_follower_take_over_at_once(make_shared: Make) -> None:
    dying, healthy = Model(pause=0.1, dies_after=9), Model(step=7, pause=0.001)
    leader = asyncio.ensure_future(fly(make_shared(settings=LONG), dying))
    await until(lambda: dying.started)
    follower = asyncio.ensure_future(fly(make_shared(settings=LONG), healthy))
    with pytest.raises(RuntimeError):
        await leader
    assert await asyncio.wait_for(follower, LONG.patience / 2) == TEXT  # neither its lease nor anybody's patience ended


async def test_a_silent_leader_is_waited_for_so_long_and_no_longer(make_shared: Make) -> None:
    hung, healthy = Model(pause=60), Model(pause=0)
    leader = asyncio.ensure_future(fly(make_shared(), hung))
    await until(lambda: hung.started)
    begun = asyncio.get_running_loop().time()
    assert await fly(make_shared(), healthy) == TEXT
    assert 0.9 < asyncio.get_running_loop().time() - begun < 60
    await ended(leader)


async def test_a_dead_redis_means_generating_alone(make_redis: Callable[..., Any], make_shared: Make) -> None:
    shared = make_shared(make_redis(started=False).url)
    model = Model(pause=0)
    assert await asyncio.gather(*(fly(shared, model) for _ in range(5))) == [TEXT] * 5
    assert model.started == 5


async def test_a_lease_whose_answer_came_too_late_is_given_back(
    redis_server: Any, make_proxy: Callable[[int], Any], counters: Counters
) -> None:
    """Else whoever asks the same would wait for a leader that there is not, until the lease has run out."""
    proxy = await make_proxy(redis_server.port)
    server = RedisEndpoint(RedisSettings(url=proxy.url))
    hasty, patient = RedisLink(server, 0.05, "small", counters), RedisLink(server, 5.0, "flight", counters)
    leases = Leases(hasty, patient, LONG)
    connected = 0
    while connected < 2:
        connected = 0
        for link in (hasty, patient):
            with suppress(StoreFault):
                connected += await link.read(lambda client: client.ping(), lambda reply: True)
    proxy.delay = 0.3
    with pytest.raises(StoreFault):
        await leases.take(KEY)
    proxy.delay = 0.0
    await leases.aclose()
    assert redis_server.keys("l:*") == []
    for link in (hasty, patient):
        await link.aclose()


async def test_redis_stalls_in_mid_flight_and_both_finish(
    make_redis: Callable[..., Any], make_shared: Make, counters: Counters
) -> None:
    server = make_redis()
    lead, follow = Model(pause=0.01), Model(step=7, pause=0.001)
    leader = asyncio.ensure_future(fly(make_shared(server.url, budget=1.0), lead))
    await until(lambda: lead.started)
    follower = asyncio.ensure_future(fly(make_shared(server.url, budget=1.0), follow))
    await until(lambda: counters.counts().get(("flight_shared", "follow")))
    server.pause()
    assert await asyncio.wait_for(asyncio.gather(leader, follower), 60) == [TEXT, TEXT]


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
    await fly(make_shared(settings=LONG), model)
    token = redis_server.command("GET", f"l:{KEY.partition}:{KEY.digest}").split(b"\r\n")[1].decode()
    stream = f"f:{KEY.partition}:{KEY.digest}{token}"
    messages = 11  # three letters each, and the end
    await until(lambda: redis_server.command("XLEN", stream) == f":{messages}\r\n".encode())
    entry = redis_server.command("XRANGE", stream, "-", "+", "COUNT", "2").split(b"\r\n")
    ids = [part.decode() for part in entry if part.count(b"-") == 1 and part.replace(b"-", b"").isdigit()]
    assert redis_server.command("XDEL", stream, ids[1]) == b":1\r\n"
    assert await fly(make_shared(settings=LONG), model) == TEXT
    assert model.started == 2


async def test_an_answer_with_a_message_too_large_for_the_stream_is_nobody_elses(
    redis_server: Any, make_shared: Make, counters: Counters
) -> None:
    model = Model(step=1200, pause=0, text=TEXT * 40)
    shared = make_shared(settings=LONG, most=1000)
    for _ in range(2):
        async with aclosing(shared.around(KEY, model.generate)) as parts:
            assert "".join([part.text async for part in parts]) == TEXT * 40
        lease = f"l:{KEY.partition}:{KEY.digest}"
        await until(lambda lease=lease: redis_server.command("GET", lease) == b"$-1\r\n")
    assert (model.started, counters.counts()["flight_shared", "lead"]) == (2, 2)
    assert ("flight_shared", "alone") not in counters.counts()


class Late(Leases):
    """The answer's end comes between a look at the stream and a look at the lease."""

    def __init__(self, items: list[bytes]) -> None:
        self.items = items
        self.held = True

    async def take(self, answer: CacheKey, within: float | None = None) -> tuple[Lease, bool]:
        return Lease(CacheKey(EntryKind.LEASE, answer.partition, answer.digest), "a" * 32), False

    async def holds(self, lease: Lease) -> bool:
        self.held = False
        return False

    async def read(self, lease: Lease, after: str, block: float) -> tuple[str, list[bytes]]:
        return ("0", []) if self.held else ("1", self.items)


async def test_an_end_that_comes_with_the_end_of_its_lease_is_read(keyring: Keyring, counters: Counters) -> None:
    envelope, model = Envelope(keyring, 1 << 20, counters), Model()
    lease, _ = await Late([]).take(KEY)
    whole = spelled(TEXT, END)
    item = envelope.seal(lease.stream, INDEX.pack(0) + pack_part(whole))
    assert item is not None
    assert await fly(CrossProcess(Late([item]), envelope, QUICK, counters), model) == TEXT
    assert model.started == 0
    assert ("flight_shared", "leader_lost") not in counters.counts()


def test_a_lease_must_outlive_its_heartbeat() -> None:
    with pytest.raises(ValueError, match="two heartbeats"):
        SingleFlightSettings(lease=1.0, heartbeat=0.6)
