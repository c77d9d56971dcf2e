"""The contract of a store, on both stores."""

from __future__ import annotations

import asyncio

import pytest

from cache.api import CacheKey, DirectoryPage, EntryKind, Store
from cache.store.redis_store import RedisStore
from tests.cache.waiting import until

PARTITION = "ab" * 16


def key(number: int, kind: EntryKind = EntryKind.RESPONSE, partition: str = PARTITION) -> CacheKey:
    return CacheKey(kind, partition, f"{number:064x}")


async def settled(store: Store) -> None:
    if isinstance(store, RedisStore):
        await store.drained()


async def test_gets_what_was_set_and_none_for_the_rest(store: Store) -> None:
    await store.set(key(1), b"one", 60)
    await store.set(key(2), b"", 60)
    assert await store.get_many([key(2), key(3), key(1)]) == (b"", None, b"one")
    assert await store.get_many([]) == ()


async def test_every_byte_survives(store: Store) -> None:
    value = bytes(range(256)) * 4096
    await store.set(key(1), value, 60)
    assert await store.get_many([key(1)]) == (value,)


async def test_set_replaces(store: Store) -> None:
    await store.set(key(1), b"old", 60)
    await store.set(key(1), b"new", 60)
    assert await store.get_many([key(1)]) == (b"new",)


async def test_kinds_and_partitions_are_apart(store: Store) -> None:
    await store.set(key(1), b"mine", 60)
    others = [key(1, EntryKind.SEMANTIC), key(1, partition="cd" * 16)]
    assert await store.get_many(others) == (None, None)


async def test_expires(store: Store) -> None:
    await store.set(key(1), b"short", 0.05)
    await store.set(key(2), b"long", 60)

    async def expired() -> bool:
        return await store.get_many([key(1)]) == (None,)

    await until(expired)
    assert await store.get_many([key(1), key(2)]) == (None, b"long")
    assert [found.digest async for found in store.scan(EntryKind.RESPONSE, PARTITION)] == [key(2).digest]


async def test_the_first_one_stands(store: Store) -> None:
    assert await store.set_if_absent(key(1), b"first", 60) == b"first"
    assert await store.set_if_absent(key(1), b"second", 60) == b"first"
    assert await store.get_many([key(1)]) == (b"first",)


async def test_one_of_many_at_once_is_first(store: Store) -> None:
    stood = await asyncio.gather(*(store.set_if_absent(key(1), b"%d" % i, 60) for i in range(50)))
    assert len(set(stood)) == 1


async def test_offer_arrives(store: Store) -> None:
    assert store.offer(key(1), b"soon", 60)
    await settled(store)
    assert await store.get_many([key(1)]) == (b"soon",)


async def test_deletes_and_says_how_many(store: Store) -> None:
    for number in range(3):
        await store.set(key(number), b"x", 60)
    assert await store.delete_many([key(0), key(2), key(9)]) == 2
    assert await store.delete_many([]) == 0
    assert await store.get_many([key(0), key(1), key(2)]) == (None, b"x", None)


async def test_scan_finds_all_of_one_partition_and_nothing_else(store: Store) -> None:
    for number in range(2500):
        store.offer(key(number), b"x", 60)
        if number % 500 == 0:
            await settled(store)
    store.offer(key(1, partition="cd" * 16), b"x", 60)
    store.offer(key(1, EntryKind.SEMANTIC), b"x", 60)
    await settled(store)
    found = [found async for found in store.scan(EntryKind.RESPONSE, PARTITION)]
    assert {found.digest for found in found} == {key(number).digest for number in range(2500)}
    assert {(found.kind, found.partition) for found in found} == {(EntryKind.RESPONSE, PARTITION)}


async def test_a_directory_tells_what_is_new_since(store: Store) -> None:
    directory = key(0, EntryKind.DIRECTORY)
    assert await store.members(directory, 0.0, 10) == DirectoryPage((), 0, 0.0, False)
    for number in range(1, 8):
        store.offer(key(number, EntryKind.SEMANTIC), b"x", 60, directory)
    await settled(store)
    page = await store.members(directory, 0.0, 4)
    assert [digest for digest, _ in page.members] == [key(number).digest for number in range(1, 5)]
    assert (page.total, page.cursor, page.more) == (7, page.members[-1][1], True)
    rest = await store.members(directory, page.members[-1][1], 100)
    assert [digest for digest, _ in rest.members] == [key(number).digest for number in range(5, 8)]
    cursors = [cursor for _, cursor in page.members + rest.members]
    assert cursors == sorted(set(cursors))
    assert (await store.members(directory, cursors[-1], 100)).members == ()


async def test_adding_a_member_again_is_news_and_no_second_member(store: Store) -> None:
    directory = key(0, EntryKind.DIRECTORY)
    for number in (1, 2, 1):
        store.offer(key(number, EntryKind.SEMANTIC), b"x", 60, directory)
    await settled(store)
    page = await store.members(directory, 0.0, 10)
    assert [digest for digest, _ in page.members] == [key(2).digest, key(1).digest]
    assert page.total == 2


async def test_a_swap_needs_the_value_that_was_read(store: Store) -> None:
    assert not await store.swap(key(1), b"what is not there", b"x", 60)
    assert await store.swap(key(1), None, b"first", 60)
    assert not await store.swap(key(1), None, b"x", 60)
    assert not await store.swap(key(1), b"fir", b"x", 60)
    assert await store.swap(key(1), b"first", b"second", 60)
    assert await store.get_many([key(1)]) == (b"second",)


async def test_one_of_many_swaps_at_once_is_done(store: Store) -> None:
    await store.set(key(1), b"old", 60)
    done = await asyncio.gather(*(store.swap(key(1), b"old", b"%d" % i, 60) for i in range(30)))
    assert sum(done) == 1
    assert await store.get_many([key(1)]) == (b"%d" % done.index(True),)


async def test_what_was_swapped_expires(store: Store) -> None:
    assert await store.swap(key(1), None, b"x", 0.05)

    async def expired() -> bool:
        return await store.get_many([key(1)]) == (None,)

    await until(expired)
    assert await store.swap(key(1), None, b"y", 60)
    assert await store.get_many([key(1)]) == (b"y",)


@pytest.mark.parametrize(("partition", "digest"), [("ab", "0" * 64), ("*" * 16, "0" * 64), ("ab" * 16, "a b" * 8)])
def test_names_are_hexadecimal(partition: str, digest: str) -> None:
    with pytest.raises(ValueError, match="hexadecimal"):
        CacheKey(EntryKind.RESPONSE, partition, digest)
