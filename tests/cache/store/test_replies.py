"""Replies taken apart within bounds: whatever is sent, what is kept and what is done at once is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.redis_server import write_keys
from cache.answers.lease import Lease, Leases
from cache.api import (
    BreakerSettings,
    BreakerState,
    BucketSize,
    CacheKey,
    EntryKind,
    RedisSettings,
    SingleFlightSettings,
    StoreFault,
)
from cache.open.counters import Counters
from cache.store import redis_parser
from cache.store.redis_buckets import RedisBuckets
from cache.store.redis_link import RedisLink
from cache.store.redis_open import READ_SIZE
from cache.store.redis_parser import AT_ONCE
from cache.store.redis_replies import (
    DEPTH,
    HEADER,
    LINE,
    ErrorReply,
    ReplyBounds,
    ReplyProgress,
    ReplyReader,
    ReplyRefusedError,
)
from cache.store.redis_store import RedisStore
from tests.cache.hostile import ENDLESS, GREETING, Reply, answering, chunk
from tests.cache.store.test_damaged import front

PARTITION = "ab" * 16
KEYS = [CacheKey(EntryKind.RESPONSE, PARTITION, f"{number:064x}") for number in range(10)]
STREAM = 1 << 19  # bytes that asyncio's stream reader holds: twice its limit and one read of the socket
VALUE = RedisSettings(url="redis://x").largest
NEVER = BreakerSettings(failures=1000)


def spelled(value: object) -> bytes:
    match value:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % value
        case bytes():
            return b"$%d\r\n%s\r\n" % (len(value), value)
        case ErrorReply():
            return b"-" + value.text.encode() + b"\r\n"
        case list():
            return b"*%d\r\n" % len(value) + b"".join(map(spelled, value))
    raise TypeError(type(value))


LEAVES = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.binary(max_size=40),
    st.text("ab \r", max_size=9).filter(lambda text: "\r" not in text).map(ErrorReply),
)
REPLIES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4), max_leaves=20)


def depth(value: object) -> int:
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


def cuts(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[begin:end] for begin, end in pairwise(ends)]


def read(reader: ReplyReader, pieces: list[bytes], shape: ReplyBounds, most: int = 3) -> object:
    """The reply that is in these pieces. No step takes apart more than it may."""
    reader.begin(shape)
    waiting = iter(pieces)
    while True:
        before = reader.elements
        progress = reader.advance(most)
        assert reader.elements - before <= most
        if progress is ReplyProgress.WHOLE:
            for piece in waiting:
                reader.feed(piece)
            return reader.reply
        if progress is ReplyProgress.HUNGRY:
            reader.feed(next(waiting))


@given(st.lists(REPLIES.filter(lambda reply: depth(reply) <= DEPTH), max_size=3), st.lists(st.integers(0, 10_000)))
def test_what_is_sent_is_read_however_it_is_cut(replies: list[object], places: list[int]) -> None:
    reader = ReplyReader()
    for reply in replies:
        data = spelled(reply)
        assert read(reader, cuts(data, places), ReplyBounds(200, max(HEADER, len(data)))) == reply
        assert reader.buffered == 0


@given(
    st.one_of(
        st.binary(max_size=80), st.lists(st.sampled_from([b"*", b"$", b":", b"3", b"\r\n", b"-", b"a"])).map(b"".join)
    )
)
def test_any_bytes_are_a_reply_or_refused_or_not_all_there(data: bytes) -> None:
    reader = ReplyReader()
    with suppress(ReplyRefusedError, StopIteration):
        read(reader, [data], ReplyBounds(20, 200))
    assert reader.elements <= 21


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        (b"*4\r\n:1\r\n:2\r\n:3\r\n:4\r\n", ReplyBounds(4)),
        (b"$100\r\n" + b"x" * 100 + b"\r\n", ReplyBounds(1, 107)),
        (b"*1\r\n" * DEPTH + b":1\r\n", ReplyBounds(DEPTH, 1000)),
        (b"+" + b"x" * (LINE - 3) + b"\r\n", ReplyBounds(1, LINE - 1)),
        (b":" + b"1" * (HEADER - 3) + b"\r\n", ReplyBounds(1, HEADER - 1)),
    ],
)
def test_one_more_than_was_asked_for_is_refused(data: bytes, shape: ReplyBounds) -> None:
    """One element, byte or list less, and it is read."""
    with pytest.raises(ReplyRefusedError):
        read(ReplyReader(), [data if b"*1" not in data else b"*1\r\n" + data], shape)
    assert read(ReplyReader(), [data], ReplyBounds(shape.elements + 1, shape.size + 1)) is not None


@pytest.mark.parametrize(
    "data", [b"$-2\r\n", b"*-2\r\n", b"$+1\r\n", b"$1_0\r\n", b"$ 1\r\n", b":\r\n", b":-\r\n", b"$3\r\nabcd\r"]
)
def test_what_is_no_reply_is_refused(data: bytes) -> None:
    with pytest.raises(ReplyRefusedError):
        read(ReplyReader(), [data], ReplyBounds(9, 99))


class Counted(ReplyReader):
    """Counts what it holds and what it does."""

    most_held = 0
    most_at_once = 0

    def feed(self, data: bytes) -> None:
        super().feed(data)
        Counted.most_held = max(Counted.most_held, self.buffered)

    def advance(self, most: int) -> ReplyProgress:
        before = self.elements
        try:
            return super().advance(most)
        finally:
            Counted.most_at_once = max(Counted.most_at_once, self.elements - before)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    Counted.most_held = Counted.most_at_once = 0
    monkeypatch.setattr(redis_parser, "ReplyReader", Counted)
    return Counted


Ask = Callable[[RedisStore], Awaitable[Any]]


async def scanned(store: RedisStore) -> list[CacheKey]:
    return [key async for key in store.scan(EntryKind.RESPONSE, PARTITION)]


async def settled(store: RedisStore) -> Any:
    buckets = RedisBuckets(store.server.settings, b"", Counters())
    try:
        return await buckets.settle("a", BucketSize(1.0, 1.0), 0.0, 1.0)
    finally:
        await buckets.aclose()


async def followed(store: RedisStore) -> Any:
    patient = RedisLink(store.server, 0.2, "flight", Counters())
    lease = Lease(KEYS[0], "0" * 32)
    try:
        return await Leases(store.link, patient, SingleFlightSettings()).read(lease, "0", 0.01)
    finally:
        await patient.aclose()


# What is asked, and the most bytes that its reply may have.
ASKED: dict[str, tuple[Ask, int]] = {
    "a value": (lambda store: store.get_many(KEYS[:1]), VALUE + 200),
    "ten values": (lambda store: store.get_many(KEYS), 2 * VALUE + 11 * 2**16),
    "a write": (lambda store: store.set(KEYS[0], b"x", 60), LINE),
    "a write if absent": (lambda store: store.set_if_absent(KEYS[0], b"x", 60), VALUE + 200),
    "a swap": (lambda store: store.swap(KEYS[0], None, b"x", 60), LINE),
    "a deletion": (lambda store: store.delete_many(KEYS), LINE),
    "members": (lambda store: store.members(KEYS[0], 0.0, 64), 2**17),
    "a page of names": (scanned, 2 * 2**20),
    "messages of a generation": (followed, 2 * VALUE + 260 * 2**16),
    "a quota": (settled, LINE),
}


def store_at(url: str) -> RedisStore:
    return RedisStore(RedisSettings(url=url, budget=0.2, write_budget=0.2, admin_budget=0.2, breaker=NEVER), Counters())


@pytest.mark.product
@pytest.mark.parametrize("reply", ENDLESS.values(), ids=ENDLESS)
async def test_what_was_not_asked_for_is_never_taken_in(reply: Reply, counted: type[Counted]) -> None:
    """A fault for each command, its connection closed, and never more held than it may answer. At once no more is taken
    apart than `AT_ONCE`. What the system's own buffers take is sent, and not read."""
    for name, (ask, size) in ASKED.items():
        counted.most_held = counted.most_at_once = 0
        with answering(reply) as hostile:
            store = store_at(hostile.url)
            with pytest.raises(StoreFault):
                await ask(store)
            await store.aclose()
            assert counted.most_held <= size + READ_SIZE, name
            assert counted.most_at_once <= AT_ONCE, name
            assert hostile.used_up == 0, name
            assert hostile.sent < size + 16 * 2**20, name


@pytest.mark.product
@pytest.mark.parametrize("reply", ENDLESS.values(), ids=ENDLESS)
async def test_a_greeting_is_bounded_as_well(reply: Reply, counted: type[Counted]) -> None:
    with answering(reply, greets=False) as hostile:
        store = store_at(hostile.url)
        for _ in range(3):
            with pytest.raises(StoreFault):
                await store.get_many(KEYS)
        await store.aclose()
        watching = RedisSettings(url="redis://master", sentinels=f"127.0.0.1:{hostile.port}", budget=0.2, breaker=NEVER)
        store = RedisStore(watching, Counters())
        with pytest.raises(StoreFault):
            await store.get_many(KEYS)
        await store.aclose()
        assert counted.most_held <= (1 << 16) + READ_SIZE
        assert counted.most_at_once <= AT_ONCE
        assert hostile.used_up == 0


@pytest.mark.product
@pytest.mark.parametrize(
    "name", ["a list of small numbers", "a value", "a map", "lists within lists", "no reply at all"]
)
async def test_three_such_replies_open_the_breaker(name: str) -> None:
    with answering(ENDLESS[name]) as hostile:
        store = RedisStore(
            RedisSettings(url=hostile.url, budget=20.0, breaker=BreakerSettings(window=600.0)), Counters()
        )
        for _ in range(3):
            assert store.states["small_reads"] is BreakerState.CLOSED
            with pytest.raises(StoreFault, match="InvalidResponse"):
                await store.get_many(KEYS)
        assert store.states["small_reads"] is BreakerState.OPEN
        with pytest.raises(StoreFault, match="breaker"):
            await store.get_many(KEYS)
        await store.aclose()


@pytest.mark.product
async def test_others_have_the_loop_while_a_long_list_is_taken_apart(counted: type[Counted]) -> None:
    """As many turns as it has parts of AT_ONCE elements."""
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    names = 3000
    page = Reply(b"*2\r\n$1\r\n0\r\n*%d\r\n" % names + b"$1\r\na\r\n" * names)
    with answering(page) as hostile:
        store = RedisStore(RedisSettings(url=hostile.url, admin_budget=20.0), Counters())
        other = asyncio.ensure_future(turn())
        assert await scanned(store) == []
        other.cancel()
        await store.aclose()
    assert turns >= names // AT_ONCE
    assert counted.most_at_once == AT_ONCE


@pytest.mark.product
async def test_what_nobody_asked_for_after_a_reply_costs_the_connection_alone(counted: type[Counted]) -> None:
    """An idle connection holds what its buffers take, and is not used again."""
    with answering(Reply(b"*1\r\n$-1\r\n", chunk(b"$-1\r\n"))) as hostile:
        store = store_at(hostile.url)
        assert await store.get_many(KEYS[:1]) == (None,)
        for _ in range(3):
            with suppress(StoreFault):
                assert await store.get_many(KEYS[:1]) == (None,)
        await store.aclose()
        assert counted.most_held <= READ_SIZE + VALUE
        assert hostile.used_up == 0


@pytest.mark.product
@pytest.mark.parametrize("reply", ENDLESS.values(), ids=ENDLESS)
async def test_no_request_fails_for_it(reply: Reply, tmp_path: Path) -> None:
    with answering(reply) as hostile:
        async with front(hostile.url, write_keys(tmp_path / "keys"), budget=0.05) as one:
            for _ in range(2):
                assert await one.use() == ["42", None, None, None]
            assert one.trouble() > 0


def test_a_redis_greets_as_the_hostile_one_does() -> None:
    assert read(ReplyReader(), [GREETING], ReplyBounds(9, 200)) == [b"mode", b"standalone", b"role", b"master"]
