"""Whatever lies in Redis under our names: a miss and a count, never an error, and no breaker opens for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from bench.redis_server import RedisServer, write_keys
from cache.answers.pump import Pump
from cache.api import (
    Allowance,
    AnswerPart,
    BreakerState,
    CacheSettings,
    EntryKind,
    Mode,
    RedisSettings,
    SemanticSettings,
    SingleFlightSettings,
    StoreFault,
)
from cache.open.caches import Caches, open_caches
from cache.open.counters import Counters
from cache.semantic.search import SimilarCache
from cache.store.redis_store import RedisStore
from tests.cache.semantic.test_search import MODEL, SELL, WordEmbedder, answer, turn
from tests.properties import example_count

ON = SemanticSettings(mode=Mode.ON, audit=0.0, threshold=0.55, strict_threshold=0.55)
ALIKE, NEAR = "how do i sell a used car", "How do I sell a used car quickly?"
ANSWER = answer("42")
MISSES = (("response_lookup", "miss"), ("semantic_lookup", "empty"))  # what MGET says of a value of another type


class Front:
    """All caches of a process, used by one caller after the other."""

    def __init__(self, caches: Caches, counters: Counters) -> None:
        self.caches, self.counters = caches, counters
        self.semantic = SimilarCache(caches._context, WordEmbedder(), ON)
        self.generated = 0

    async def fill(self) -> None:
        """Leaves an entry of every kind that is written."""
        await self.use()
        await self.written()
        for text in (ALIKE, NEAR):
            asked = turn(text, caller="somebody")
            found = await self.semantic.lookup(asked, Allowance(5.0))
            assert found.candidate is not None
            await self.semantic.observe(asked, found, answer("other" if text == NEAR else "42"))
        await self.written()

    async def use(self) -> list[str | None]:
        """Asks all that is asked for a request, and stores all. The answer that is generated, and what was found."""
        question, asked = turn(SELL).question, turn(ALIKE, caller="somebody")
        hit = await self.caches.responses.get(question, Allowance(5.0))
        await self.caches.partition("acme", Allowance(5.0))
        found = await self.semantic.lookup(asked, Allowance(5.0))
        await self.semantic.observe(asked, found, ANSWER)
        near = await self.semantic.lookup(turn(NEAR, caller="another"), Allowance(5.0))
        async with self.caches.join(question, lambda: Pump(self.generate(), set())) as parts:
            text = "".join([part.text async for part in parts])
        await self.caches.responses.put(question, ANSWER)
        await self.semantic.put(turn(SELL), ANSWER)
        served = (hit, found.served, near.served)
        return [text, *(None if one is None else one.text for one in served)]

    async def generate(self) -> AsyncGenerator[AnswerPart, None]:
        self.generated += 1
        for part in ANSWER.parts:
            yield part

    async def written(self) -> None:
        store = self.caches._context.store
        assert isinstance(store, RedisStore)
        await store.drained()

    def trouble(self) -> int:
        counts = self.counters.counts()
        told = sum(count for (event, _), count in counts.items() if event in ("cache_rejected", "cache_fault"))
        return told + sum(counts.get(miss, 0) for miss in MISSES)

    def closed(self) -> bool:
        return all(state is BreakerState.CLOSED for state in self.caches.states.values())


@asynccontextmanager
async def front(url: str, keys: Path, budget: float = 2.0) -> AsyncIterator[Front]:
    counters = Counters()
    made = CacheSettings(
        redis=RedisSettings(url=url, budget=budget, write_budget=2.0),
        key_file=keys,
        semantic=SemanticSettings(mode=Mode.OFF),
        single_flight=SingleFlightSettings(lease=0.4, heartbeat=0.1, patience=0.3),
    )
    caches = open_caches(made, MODEL, counters)
    one = Front(caches, counters)
    try:
        yield one
    finally:
        await one.semantic.aclose()
        await caches.aclose()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys")


@pytest.fixture
def redis(redis_server: RedisServer) -> Iterator[Any]:
    with Redis.from_url(redis_server.url) as client:
        yield client


def put(redis: Any, name: bytes, kind: str, value: bytes) -> None:
    """Replaces what lies under a name."""
    redis.delete(name)
    match kind:
        case "string":
            redis.set(name, value)
        case "list":
            redis.rpush(name, value)
        case "set":
            redis.sadd(name, value)
        case "sorted set":
            redis.zadd(name, {value: 1.0, b"\xff\xfe": float("inf"), b"zz": -1.0})
        case "hash":
            redis.hset(name, mapping={b"c": value, value or b"x": b"not a number"})
        case "stream":
            redis.xadd(name, {value or b"x": value})
            redis.xadd(name, {b"c": value})


TYPES = ("string", "list", "set", "sorted set", "hash", "stream")


async def survives(one: Front, redis: Any, name: bytes, damage: Callable[[], None]) -> None:
    """Nothing but right answers and misses, each of which is counted, and the next request has what it stored."""
    before = one.trouble()
    damage()
    text, *found = await one.use()
    await one.written()
    assert text == "42"
    assert {*found, None} <= {"42", None}
    if None in found[:2]:
        assert one.trouble() > before, name
    assert one.closed()


async def test_each_kind_of_entry_as_every_type_and_cut_short(
    redis_server: RedisServer, keys: Path, redis: Any
) -> None:
    async with front(redis_server.url, keys) as one:
        await one.fill()
        names = sorted(redis.keys("*"))
        kinds = {name.split(b":")[0].decode() for name in names}
        assert kinds == {kind.value for kind in EntryKind} - {
            EntryKind.BLOCK.value,
            EntryKind.QUOTA.value,
        }  # which have tests of their own
        whole = {name: redis.dump(name) for name in names}
        for name in names:
            value = redis.get(name) if redis.type(name) == b"string" else b"\x93\x01"
            changes = [(kind, b"x") for kind in TYPES]
            changes += [("string", value[:cut]) for cut in (0, 1, len(value) // 2, len(value) - 1)]
            changes += [("string", value + b"x"), ("string", b"0" * 40_000), ("stream", value), ("sorted set", value)]
            for kind, other in changes:
                await survives(one, redis, name, lambda n=name, k=kind, v=other: put(redis, n, k, v))
                for again, dumped in whole.items():
                    redis.restore(again, 60_000, dumped, replace=True)


def test_any_bytes_under_any_name(redis_server: RedisServer, keys: Path, redis: Any) -> None:
    with asyncio.Runner() as runner:
        opened = front(redis_server.url, keys)
        one = runner.run(opened.__aenter__())
        runner.run(one.fill())
        names = sorted(redis.keys("*"))

        @given(
            name=st.sampled_from(names),
            kind=st.sampled_from(TYPES),
            value=st.one_of(
                st.binary(max_size=200), st.sampled_from([b"0" * 32, b"ab" * 16, bytes(16), b"-1", b"nan"])
            ),
        )
        @settings(max_examples=example_count(60), deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def check(name: bytes, kind: str, value: bytes) -> None:
            runner.run(survives(one, redis, name, lambda: put(redis, name, kind, value)))

        check()
        runner.run(opened.__aexit__(None, None, None))


async def test_odd_members_of_a_directory_hide_no_others(redis_server: RedisServer, keys: Path, redis: Any) -> None:
    """Neither do cursors that nothing comes after."""
    async with front(redis_server.url, keys) as one:
        await one.fill()
        (directory,) = redis.keys("d:*")
        odd = {
            b"\xff": 1.0,
            b"": 2.0,
            b"no digest": 3.0,
            b"ab" * 48: float("inf"),
            b"cd" * 48: 2.0**60,
            b"ef" * 48: -5.0,
        }
        redis.zadd(directory, odd)
        async with front(redis_server.url, keys) as other:
            assert (await other.use())[2] == "42"
            await other.written()
            assert other.counters.counts()["cache_rejected", "directory"] == 3
            assert await other.semantic.put(turn("What do cows eat?"), answer("grass"))
            await other.written()
            assert redis.zscore(directory, b"ab" * 48) is None
            found = await one.semantic.lookup(turn("What do cows eat?"), Allowance(5.0))
            assert found.served is not None
            assert found.served.text == "grass"


async def test_a_field_of_evidence_that_is_no_number(redis_server: RedisServer, keys: Path, redis: Any) -> None:
    async with front(redis_server.url, keys) as one:
        await one.fill()
        for name in redis.keys("v:*"):
            put(redis, name, "hash", b"47:right")
        assert await one.use() == ["42", "42", "42", None]
        assert one.closed()


async def test_names_that_are_none_of_ours_are_left_out_of_a_flush(
    redis_server: RedisServer, keys: Path, redis: Any
) -> None:
    async with front(redis_server.url, keys) as one:
        await one.fill()
        (entry,) = redis.keys("r:*")
        for odd in (b"zz", b"", b"\xff\xfe", b"0" * 300):
            redis.set(entry.rpartition(b":")[0] + b":" + odd, b"x")
        assert await one.caches.flush("acme", (EntryKind.RESPONSE, EntryKind.SEMANTIC)) == 2


REPLIES = (
    b":5\r\n",
    b"+OK\r\n",
    b"$-1\r\n",
    b"$0\r\n\r\n",
    b"$3\r\nabc\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"*1\r\n:1\r\n",
    b"*2\r\n$1\r\na\r\n$1\r\nb\r\n",
    b"*2\r\n*3\r\n$1\r\na\r\n$1\r\nb\r\n$1\r\nc\r\n:1\r\n",
    b"*2\r\n*2\r\n$1\r\na\r\n$1\r\nb\r\n:1\r\n",
    b"*1\r\n*2\r\n$1\r\na\r\n*1\r\n*2\r\n$3\r\n0-1\r\n*0\r\n",
    b"-ERR what\r\n",
    b"-WRONGTYPE what\r\n",
    b":x\r\n",
    b"$x\r\n",
    b"$-7\r\n",
    b"*x\r\n",
    b"?\r\n",
    b"\r\n",
    b"\x00" * 64 + b"\r\n",
    b"*1\r\n" * 3000,
    b"$99999999999999\r\n",
)


@asynccontextmanager
async def answering(reply: bytes) -> AsyncIterator[str]:
    """A server that says the same to every command but HELLO. Gives its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readline():
                words = []
                for _ in range(int(head[1:])):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2])
                writer.write(b"*0\r\n" if words[0] == b"HELLO" else reply)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize("reply", REPLIES, ids=range(len(REPLIES)))
async def test_replies_that_are_none_are_faults(reply: bytes, keys: Path) -> None:
    async with answering(reply) as url, front(url, keys, budget=0.1) as one:
        for _ in range(2):
            assert await one.use() == ["42", None, None, None]
        with suppress(StoreFault):
            await one.caches.flush("acme", (EntryKind.RESPONSE,))
        assert one.trouble() > 0
        assert one.generated > 0
