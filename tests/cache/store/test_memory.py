"""Bounds of the memory store, against a plain model of least-recently-used."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.api import CacheKey, EntryKind
from cache.store.memory import OVERHEAD, MemoryStore
from tests.properties import example_count

BOUND = 3000  # four entries, or fewer: something goes in almost every example


def key(number: int) -> CacheKey:
    return CacheKey(EntryKind.RESPONSE, "ab" * 16, f"{number:064x}")


def cost(value: bytes) -> int:
    return OVERHEAD + len(key(0).name) + len(value)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 9), st.integers(0, 1500), st.integers(1, 20)),
        st.tuples(st.just("get"), st.integers(0, 9), st.just(0), st.just(0)),
        st.tuples(st.just("delete"), st.integers(0, 9), st.just(0), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 5), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(steps=STEPS)
@settings(max_examples=example_count(200), deadline=None)
def test_keeps_the_most_recently_used_within_its_bytes(steps: list[tuple[str, int, int, int]]) -> None:
    clock = Clock()
    store = MemoryStore(BOUND, clock)
    model: OrderedDict[int, tuple[bytes, float]] = OrderedDict()

    async def play() -> None:
        for verb, number, size, ttl in steps:
            if verb == "wait":
                clock.now += number
            elif verb == "delete":
                live = number in model and model[number][1] > clock.now
                model.pop(number, None)
                assert await store.delete_many([key(number)]) == int(live)
            elif verb == "set":
                value = bytes(size)
                model.pop(number, None)
                model[number] = (value, clock.now + ttl)
                while sum(cost(value) for value, _ in model.values()) > BOUND:
                    model.popitem(last=False)
                await store.set(key(number), value, ttl)
            else:
                expected = None
                if number in model:
                    if model[number][1] > clock.now:
                        expected = model[number][0]
                        model.move_to_end(number)
                    else:
                        del model[number]
                assert await store.get_many([key(number)]) == (expected,)
            assert store.held == sum(cost(value) for value, _ in model.values()) <= BOUND
            assert len(store) == len(model)

    asyncio.run(play())


async def test_what_was_read_last_goes_last() -> None:
    store = MemoryStore(3 * cost(b""))
    for number in range(3):
        await store.set(key(number), b"", 60)
    await store.get_many([key(0)])
    await store.set(key(3), b"", 60)
    found = await store.get_many([key(number) for number in range(4)])
    assert found == (b"", None, b"", b"")


async def test_a_directory_is_bounded_and_forgets_its_oldest() -> None:
    store = MemoryStore(1 << 20, members=3)
    directory = CacheKey(EntryKind.DIRECTORY, "ab" * 16, "0" * 64)
    for number in range(5):
        store.offer(key(number), b"", 60, directory)
    page = await store.members(directory, 0.0, 100)
    assert [digest for digest, _ in page.members] == [key(number).digest for number in (2, 3, 4)]
    assert page.total == 3


async def test_a_bound_of_nothing_keeps_nothing() -> None:
    store = MemoryStore(0)
    await store.set(key(1), b"", 60)
    assert not store.offer(key(1), b"", 60)
    assert await store.get_many([key(1)]) == (None,)
    assert await store.set_if_absent(key(1), b"x", 60) == b"x"
    assert await store.swap(key(1), None, b"x", 60)
    assert await store.get_many([key(1)]) == (None,)


async def test_directories_and_counters_count_as_bytes() -> None:
    store = MemoryStore(100_000)
    directory = CacheKey(EntryKind.DIRECTORY, "ab" * 16, "0" * 64)
    before = store.held
    for number in range(50):
        store.offer(key(number), b"", 60, directory)
    plain = 50 * cost(b"")
    assert store.held - before > plain + 50 * 64
    await store.aclose()
    assert store.held == 0
    assert len(store) == 0
