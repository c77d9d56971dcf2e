"""Epochs: how long one is believed, and what happens where the store does not answer."""

from __future__ import annotations

from typing import Any

import pytest

from cache.api import Allowance, CacheKey, CacheSettings, EntryKind, ModelIdentity, Store, StoreFault
from cache.open.caches import open_caches
from cache.open.counters import Counters
from cache.seal.keyring import Keyring
from cache.seal.partition import PREFIXES, RECENT, Epochs, Partitions
from cache.store.memory import MemoryStore

MODEL = ModelIdentity(weights="w", tokenizer="t")


class Sick(MemoryStore):
    """Counts what it is asked, and does not answer while it is ill."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.asked = 0
        self.ill = False

    async def set_if_absent(self, key: CacheKey, value: bytes, ttl: float, within: float | None = None) -> bytes:
        self.asked += 1
        if self.ill:
            raise StoreFault("ill")
        return await super().set_if_absent(key, value, ttl, within)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def replica(store: Store, keyring: Keyring, clock: Clock, purpose: bytes = PREFIXES) -> Epochs:
    return Epochs(store, Partitions(keyring, MODEL), purpose, clock)


async def test_a_bump_is_seen_elsewhere_within_a_second(store: Store, keyring: Keyring) -> None:
    clock = Clock()
    one, other = replica(store, keyring, clock), replica(store, keyring, clock)
    first = await one.recent("acme")
    assert await other.recent("acme") == first
    theirs = await other.recent("bravo")
    await one.bump("acme")
    fresh = await one.recent("acme")
    assert fresh != first
    clock.now += RECENT / 2
    assert await other.recent("acme") == first
    clock.now += RECENT / 2
    assert await other.recent("acme") == fresh
    assert await one.recent("bravo") == theirs


async def test_purposes_are_apart(store: Store, keyring: Keyring) -> None:
    clock = Clock()
    answers, prefixes = replica(store, keyring, clock, b"epoch"), replica(store, keyring, clock)
    before = await answers.current("acme")
    await prefixes.bump("acme")
    assert await answers.current("acme") == before != await prefixes.current("acme")


async def test_the_store_is_asked_once_a_second_and_its_silence_changes_nothing(keyring: Keyring) -> None:
    clock, store = Clock(), Sick()
    epochs = replica(store, keyring, clock)
    store.ill = True
    with pytest.raises(StoreFault):
        await epochs.recent("acme")
    store.ill = False
    known = await epochs.recent("acme")
    for _ in range(10):
        assert await epochs.recent("acme") == known
    assert store.asked == 2
    store.ill = True
    for second in range(1, 4):
        clock.now += RECENT
        for _ in range(10):
            assert await epochs.recent("acme") == known
        assert store.asked == 2 + second


async def test_a_flush_of_prefixes_changes_their_partition_alone() -> None:
    caches = open_caches(CacheSettings(), MODEL, Counters())

    async def partition(tenant: str) -> Any:
        return await caches.partition(tenant, Allowance(1.0))

    mine, theirs = await partition("acme"), await partition("bravo")
    assert mine != theirs
    assert await caches.flush("acme", (EntryKind.BLOCK,)) == 0
    flushed = await partition("acme")
    assert flushed not in (mine, None)
    await caches.flush_tenant("acme")
    assert await partition("acme") not in (mine, flushed, None)
    assert await partition("bravo") == theirs
    await caches.aclose()
