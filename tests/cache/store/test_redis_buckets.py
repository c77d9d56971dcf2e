"""Buckets in a real Redis, and what becomes of them where somebody else wrote into it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from bench.redis_server import RedisServer
from cache.api import BucketSize, RedisSettings, StoreFault
from cache.open.counters import Counters
from cache.store.redis_buckets import DEBT, RedisBuckets

SLOW = BucketSize(per_second=0.01, most=1000.0)  # fills by nothing while a test runs
FAST = BucketSize(per_second=1e6, most=1000.0)


@pytest.fixture
async def buckets(redis_server: RedisServer, counters: Counters) -> AsyncIterator[RedisBuckets]:
    made = RedisBuckets(RedisSettings(url=redis_server.url, budget=20.0), b"secret", counters)
    yield made
    await made.aclose()


async def test_what_is_wanted_is_given_while_it_is_there(buckets: RedisBuckets) -> None:
    assert (await buckets.settle("a", SLOW, 0, 600)).tokens == 600
    grant = await buckets.settle("a", SLOW, 0, 600)
    assert grant.tokens == 400
    assert grant.level == pytest.approx(0, abs=1)
    assert (await buckets.settle("a", SLOW, 0, 600)).tokens == 0
    assert (await buckets.settle("b", SLOW, 0, 600)).tokens == 600, "a bucket for each"


async def test_what_is_owed_is_taken_in_any_case(buckets: RedisBuckets) -> None:
    grant = await buckets.settle("a", SLOW, 1500, 100)
    assert grant.tokens == 0
    assert grant.level == pytest.approx(-500, abs=1)
    assert (await buckets.settle("a", BucketSize(1e9, 1000.0), 0, 0)).level == 1000, "paid back at its rate"


async def test_what_is_given_back_is_there_again_and_no_more_than_it_holds(buckets: RedisBuckets) -> None:
    await buckets.settle("a", SLOW, 0, 600)
    assert (await buckets.settle("a", SLOW, 0, -200)).level == pytest.approx(600, abs=1)
    assert (await buckets.settle("a", SLOW, 0, -5000)).level == 1000


async def test_a_bucket_that_would_be_full_is_not_kept(buckets: RedisBuckets, redis_server: RedisServer) -> None:
    await buckets.settle("a", FAST, 0, 600)
    (name,) = redis_server.keys("*")
    assert name.startswith("q:")
    assert b"acme" not in redis_server.command("KEYS", "*")
    assert 0 < int(redis_server.command("TTL", name)[1:]) <= 2


@pytest.mark.parametrize(
    "value",
    ["", "x", "nan nan", "inf 1", "900", "1e300 1", "900 1e300", "900 99999999999", "-nan 1", "\0" * 99, "9" * 400],
)
async def test_what_is_no_bucket_is_a_full_one(buckets: RedisBuckets, redis_server: RedisServer, value: str) -> None:
    await buckets.settle("a", SLOW, 0, 600)
    (name,) = redis_server.keys("*")
    redis_server.command("SET", name, value)
    grant = await buckets.settle("a", SLOW, 0, 100)
    assert (grant.tokens, grant.level) == (100, pytest.approx(900, abs=1))


async def test_a_key_of_another_type_is_written_over(buckets: RedisBuckets, redis_server: RedisServer) -> None:
    await buckets.settle("a", SLOW, 0, 600)
    (name,) = redis_server.keys("*")
    redis_server.command("DEL", name)
    redis_server.command("LPUSH", name, "x")
    assert (await buckets.settle("a", SLOW, 0, 100)).tokens == 100
    assert (await buckets.settle("a", SLOW, 0, 0)).level == pytest.approx(900, abs=1)


async def test_a_forged_level_neither_gives_more_than_a_full_bucket_nor_closes_it_for_more_than_a_day(
    buckets: RedisBuckets, redis_server: RedisServer
) -> None:
    await buckets.settle("a", SLOW, 0, 600)
    (name,) = redis_server.keys("*")
    redis_server.command("SET", name, f"{9 * 10**15} 1")
    assert (await buckets.settle("a", SLOW, 0, 10**9)).tokens == 1000
    since = redis_server.command("TIME").split(b"\r\n")[2].decode()
    redis_server.command("SET", name, f"-{9 * 10**15} {since}")
    grant = await buckets.settle("a", SLOW, 0, 0)
    assert grant.level >= -DEBT * SLOW.per_second


async def test_without_redis_it_is_a_fault(counters: Counters, unused_port: int) -> None:
    buckets = RedisBuckets(RedisSettings(url=f"redis://127.0.0.1:{unused_port}"), b"", counters)
    with pytest.raises(StoreFault):
        await buckets.settle("a", SLOW, 0, 1)
    await buckets.aclose()
