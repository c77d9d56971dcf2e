"""Redis in every kind of trouble: no error leaves the lookup, no wait is longer than the budget."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cache.api import BreakerSettings, BreakerState, CacheKey, EntryKind, RedisSettings, StoreFault
from cache.open.counters import Counters
from cache.store.redis_store import RedisStore
from tests.cache.waiting import plain_wait, until
from tests.redis_guarded import certify, tls_flags

PARTITION = "ab" * 16
BUDGET = 0.020
SLACK = 1.25  # of what a plain wait for the budget takes: 25 ms where that is exact
CALLS = 600
QUICK = BreakerSettings(cooldown=0.2)


def key(number: int) -> CacheKey:
    return CacheKey(EntryKind.RESPONSE, PARTITION, f"{number:064x}")


Open = Callable[..., RedisStore]


@pytest.fixture
async def open_store(counters: Counters) -> AsyncIterator[Open]:
    """Stores that are closed even where their test fails."""
    made: list[RedisStore] = []

    def make(url: str, **changes: Any) -> RedisStore:
        made.append(
            RedisStore(RedisSettings(**{"url": url, "breaker": QUICK, "write_budget": 20.0, **changes}), counters)
        )
        return made[-1]

    yield make
    for store in made:
        await store.aclose()


async def warmed(store: RedisStore) -> RedisStore:
    """Connected: the first connection of all imports modules and may take longer than the budget."""
    for _ in range(100):
        try:
            await store.get_many([key(0)])
            return store
        except StoreFault:
            await asyncio.sleep(0.05)
    pytest.fail("no connection")


async def waits(store: RedisStore) -> tuple[list[float], float]:
    """How long lookups took, answered or not, and the longest of plain waits of the same budget in between. Anything
    but StoreFault fails the test."""
    taken, plain = [], []
    for number in range(CALLS):
        begun = time.perf_counter()
        with contextlib.suppress(StoreFault):
            await store.get_many([key(number)])
        taken.append(time.perf_counter() - begun)
        if number % 30 == 0:
            plain.append(await plain_wait(BUDGET))
    return sorted(taken), max(plain)


def p99(taken: list[float]) -> float:
    return taken[int(0.99 * len(taken)) - 1]


async def closed(store: RedisStore) -> bool:
    """Whether it asks Redis again: after one that was answered, unless the next was too late on a busy machine."""
    return await answers(store) and store.states["small_reads"] is BreakerState.CLOSED


async def answers(store: RedisStore) -> bool:
    try:
        await store.get_many([key(0)])
    except StoreFault:
        return False
    return True


async def found(store: RedisStore, number: int) -> bytes | None:
    """What lies there: as often as it takes, where the machine is busy for longer than the budget."""
    values: list[bytes | None] = []

    async def answered() -> bool:
        with contextlib.suppress(StoreFault):
            values.extend(await store.get_many([key(number)]))
        return bool(values)

    await until(answered)
    return values[0]


@pytest.mark.proof  # the delay counts in real time: where the loop is late as well, another connection is begun
async def test_a_connection_slower_than_the_budget_comes_about_all_the_same(
    redis_server: Any, make_proxy: Callable[[int], Awaitable[Any]], counters: Counters, open_store: Open
) -> None:
    proxy = await make_proxy(redis_server.port)
    proxy.delay = 0.06
    store = open_store(proxy.url)
    with pytest.raises(StoreFault):
        await store.get_many([key(1)])

    async def connected() -> bool:
        return bool(vars(vars(store.link)["_clients"])["_idle"])

    await until(connected)
    proxy.delay = 0.0
    accepted = proxy.accepted
    await until(partial(answers, store))
    assert proxy.accepted == accepted == 1  # the connection of the one who gave up


async def test_refused_costs_next_to_nothing_and_starts_late(
    make_redis: Callable[..., Any], counters: Counters, open_store: Open
) -> None:
    server = make_redis(started=False)
    store = open_store(server.url)
    taken, plain = await waits(store)
    assert p99(taken) < SLACK * plain
    assert store.states["small_reads"] is not BreakerState.CLOSED
    assert counters.counts()["cache_fault", "breaker"] > CALLS * 5 / 6
    server.start()
    await until(partial(closed, store))


async def test_stalled_costs_the_budget_then_nothing_then_recovers(
    make_redis: Callable[..., Any], counters: Counters, open_store: Open
) -> None:
    server = make_redis()
    store = await warmed(open_store(server.url))
    await store.set(key(7), b"still here", 60)
    server.pause()
    gc.disable()
    try:
        taken, plain = await waits(store)
    finally:
        gc.enable()
    assert p99(taken) < SLACK * plain
    assert sum(taken) < CALLS * plain / 8
    assert store.states["small_reads"] is not BreakerState.CLOSED
    server.resume()
    await until(partial(answers, store))
    assert await found(store, 7) == b"still here"


async def test_slow_beyond_the_budget_is_a_fault_and_never_another_keys_value(
    redis_server: Any, make_proxy: Callable[[int], Awaitable[Any]], counters: Counters, open_store: Open
) -> None:
    proxy = await make_proxy(redis_server.port)
    store = await warmed(open_store(proxy.url))
    for number in range(8):
        await store.set(key(number), b"%d" % number, 60)
    for delay in (0.015, 0.03, 0.0, 0.025, 0.001, 0.0):
        proxy.delay = delay
        for number in range(8):
            try:
                assert await store.get_many([key(number)]) == (b"%d" % number,)
            except StoreFault:
                await asyncio.sleep(0.01)
    proxy.delay = 0.0
    for number in range(8):
        assert await found(store, number) == b"%d" % number


async def test_cut_in_the_middle_of_a_value(
    redis_server: Any, make_proxy: Callable[[int], Awaitable[Any]], counters: Counters, open_store: Open
) -> None:
    proxy = await make_proxy(redis_server.port)
    store = await warmed(open_store(proxy.url, budget=20.0))
    await store.set(key(1), b"v" * 10_000, 60)
    proxy.cut_after = 100
    with pytest.raises(StoreFault):
        await store.get_many([key(1)])
    proxy.cut_after = None
    await until(partial(answers, store))
    assert await store.get_many([key(1)]) == (b"v" * 10_000,)


async def test_full_memory_fails_writes_and_leaves_reads_alone(
    make_redis: Callable[..., Any], counters: Counters, open_store: Open
) -> None:
    server = make_redis()
    store = await warmed(open_store(server.url, budget=20.0))
    await store.set(key(1), b"kept", 60)
    server.command("CONFIG", "SET", "maxmemory", "1mb")
    server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    for number in range(200):
        store.offer(key(number + 10), bytes(20_000), 60)
    await store.drained()
    assert counters.counts()["cache_write_failed", ""] > 0
    assert await store.get_many([key(1)]) == (b"kept",)
    assert store.states["small_reads"] is BreakerState.CLOSED
    server.command("CONFIG", "SET", "maxmemory", "0")

    async def written() -> bool:
        with contextlib.suppress(StoreFault):
            await store.set(key(2), b"again", 60)
            return True
        return False

    await until(written)
    assert store.states["bulk_writes"] is BreakerState.CLOSED


async def test_a_read_only_replica_still_serves(
    make_redis: Callable[..., Any], counters: Counters, open_store: Open
) -> None:
    server = make_redis()
    store = await warmed(open_store(server.url, budget=20.0))
    await store.set(key(1), b"kept", 60)
    server.command("REPLICAOF", "127.0.0.1", "1")
    for number in range(5):
        with pytest.raises(StoreFault):
            await store.set(key(number + 10), b"x", 60)
    assert store.states["bulk_writes"] is BreakerState.OPEN
    assert await store.get_many([key(1)]) == (b"kept",)


async def test_flushed_is_a_miss(redis_server: Any, counters: Counters, open_store: Open) -> None:
    store = await warmed(open_store(redis_server.url, budget=20.0))
    await store.set(key(1), b"gone", 60)
    redis_server.command("FLUSHALL")
    assert await store.get_many([key(1)]) == (None,)


async def test_a_foreign_type_under_our_name_harms_nobody_else(
    redis_server: Any, counters: Counters, open_store: Open
) -> None:
    store = await warmed(open_store(redis_server.url, budget=20.0))
    redis_server.command("LPUSH", key(1).name, "what")
    assert await store.get_many([key(1)]) == (None,)
    redis_server.command("SADD", key(2).name, "what")
    for _ in range(5):
        with pytest.raises(StoreFault):
            await store.members(key(2), 0.0, 10)
    assert store.states["small_reads"] is BreakerState.CLOSED


async def test_writes_are_dropped_under_pressure_not_queued_for_ever(
    make_redis: Callable[..., Any], counters: Counters, open_store: Open
) -> None:
    server = make_redis()
    store = await warmed(open_store(server.url, queue_items=10, queue_bytes=5000))
    server.pause()
    assert [store.offer(key(i), bytes(100), 60) for i in range(12)] == [True] * 10 + [False] * 2
    assert not store.offer(key(20), bytes(5000), 60)
    assert store.queued == 10 * 100
    assert ("cache_write_failed", "") not in counters.counts()  # as after a wait for this server
    assert counters.counts()["cache_write_dropped", "response"] == 3
    server.resume()


async def test_a_callers_cancel_leaves_the_store_whole(redis_server: Any, counters: Counters, open_store: Open) -> None:
    store = await warmed(open_store(redis_server.url, budget=20.0, connections=2))
    for number in range(50):
        await store.set(key(number), b"%d" % number, 60)
    for round_ in range(30):
        tasks = [asyncio.ensure_future(store.get_many([key(number)])) for number in range(50)]
        await asyncio.sleep(0.0002 * (round_ % 7))
        for task in tasks[::2]:
            task.cancel()
        for number, answer in enumerate(await asyncio.gather(*tasks, return_exceptions=True)):
            assert isinstance(answer, asyncio.CancelledError | StoreFault) or answer == (b"%d" % number,)
    assert await store.get_many([key(3)]) == (b"3",)


async def test_no_time_left_asks_nothing(redis_server: Any, counters: Counters, open_store: Open) -> None:
    store = await warmed(open_store(redis_server.url))
    with pytest.raises(StoreFault):
        await store.get_many([key(1)], within=0.0)
    assert counters.counts()["cache_fault", "starved"] == 1
    assert store.states["small_reads"] is BreakerState.CLOSED


async def test_password(make_redis: Callable[..., Any], tmp_path: Path, counters: Counters, open_store: Open) -> None:
    server = make_redis("--requirepass", "long and secret")
    secret = tmp_path / "password"
    secret.write_text("long and secret\n")
    right = await warmed(open_store(server.url, password_file=secret))
    await right.set(key(1), b"x", 60)
    wrong = open_store(server.url, budget=20.0)
    with pytest.raises(StoreFault):
        await wrong.get_many([key(1)])


async def test_tls(
    make_redis: Callable[..., Any], tmp_path: Path, counters: Counters, open_store: Open, unused_port: int
) -> None:
    certify(tmp_path)
    server = make_redis(*tls_flags(tmp_path, unused_port, "no"), port=unused_port)
    url = f"rediss://127.0.0.1:{server.port}/0"
    trusting = await warmed(open_store(url, ca_file=tmp_path / "ca.pem", budget=20.0))
    await trusting.set(key(1), b"sealed twice", 60)
    assert await trusting.get_many([key(1)]) == (b"sealed twice",)
    wary = open_store(url, budget=20.0)
    with pytest.raises(StoreFault):
        await wary.get_many([key(1)])


@pytest.mark.parametrize(
    "changes",
    [
        {"url": "http://localhost"},
        {"url": "redis://h", "budget": 0},
        {"url": "redis://h", "jitter": 1.0},
        {"url": "redis://h", "queue_items": -1},
    ],
)
def test_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"redis|greater than 0|jitter"):
        RedisSettings(**changes)
