"""Keeps evidence in the store: one sealed value for each kind of difference, changed by compare-and-set.

The kind is the words that only one of two questions has, and whether the shared words are reordered: three hundred
observations that `quickly` is harmless are evidence for no other word.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from cache.api import CacheKey, EntryKind, StoreFault
from cache.seal.context import CacheContext
from cache.seal.partition import encode
from cache.semantic import lexicon as lex
from cache.semantic.evidence import DAY, TAG_BYTES, Evidence, TenantDay, unpack_day, unpack_evidence
from cache.semantic.words import words_of

T = TypeVar("T")

KEPT = 30.0 * DAY  # seconds that evidence is kept after its last observation
DIRECTORY_DIGITS = 32  # leading hexadecimal digits of an entry's digest, which name its directory
_TRIES = 4  # attempts to change a value that another replica changes at the same time


def difference(one: str, other: str) -> tuple[tuple[tuple[str, ...], ...], bool]:
    """Words of each question that the other lacks, and whether the shared ones are reordered; symmetric. Articles,
    `not`, `do` and `be` are joined to the next word: that `an` was harmless before `apple` is no evidence for `an`
    before `iron`."""
    a, b = _spoken(one), _spoken(other)
    mine, theirs = Counter(a) - Counter(b), Counter(b) - Counter(a)
    moved = [word for word in a if word not in mine] != [word for word in b if word not in theirs]
    return tuple(sorted((tuple(sorted(mine.elements())), tuple(sorted(theirs.elements()))))), moved


def _spoken(text: str) -> list[str]:
    spoken: list[str] = []
    bound = ""
    for word in words_of(text).words:
        bound = f"{bound} {word}" if bound else word
        if word not in lex.BOUND:
            spoken.append(bound)
            bound = ""
    return [*spoken, bound] if bound else spoken


class Observations:
    """`clock` returns seconds since 1970, since evidence outlives the process."""

    def __init__(self, context: CacheContext, clock: Callable[[], float] = time.time) -> None:
        self._context = context
        self._clock = clock
        self._adding = asyncio.Lock()  # within a process, updates do not conflict

    def strict(self, entry: CacheKey) -> CacheKey:
        return CacheKey(EntryKind.EVIDENCE, entry.partition, entry.digest[:DIRECTORY_DIGITS])

    def learned(self, tenant: str, entry: CacheKey, one: str, other: str) -> CacheKey:
        """About all pairs in an entry's directory that differ as these two do."""
        kind = self._context.partitions.digest(tenant, b"difference", encode(difference(one, other)))
        return CacheKey(EntryKind.EVIDENCE, entry.partition, entry.digest[:DIRECTORY_DIGITS] + kind[:DIRECTORY_DIGITS])

    def wrongs(self, entry: CacheKey, strict: bool) -> CacheKey:
        """How often one entry's answer would have been wrong."""
        return CacheKey(EntryKind.EVIDENCE, entry.partition, entry.digest + ("01" if strict else "00"))

    def day(self, tenant: str, entry: CacheKey) -> CacheKey:
        digest = self._context.partitions.digest(tenant, b"day of evidence")
        return CacheKey(EntryKind.EVIDENCE, entry.partition, digest[:DIRECTORY_DIGITS])

    def open(self, key: CacheKey, sealed: bytes | None) -> Evidence:
        """Counts a rejection if the value is damaged or of another schema."""
        return self._opened(key, sealed, unpack_evidence) or Evidence()

    async def read(self, keys: Sequence[CacheKey], within: float | None) -> tuple[Evidence, ...]:
        values = await self._context.store.get_many(keys, within)
        return tuple(map(self.open, keys, values))

    async def add(self, key: CacheKey, tenant: str, caller: str, right: bool) -> None:
        """Ignores the limits per day: for evidence that can only stop answers. Raises StoreFault."""
        tag = self._tag(tenant, caller)

        async def once() -> bool:
            (standing,) = await self._context.store.get_many([key])
            return await self._swap(key, standing, self.open(key, standing).with_one(tag, right))

        await self._tried(once)

    async def learn(self, key: CacheKey, day: CacheKey, tenant: str, caller: str) -> None:
        """Respects the limits in `evidence`. Raises StoreFault."""
        tag, store = self._tag(tenant, caller), self._context.store

        async def once() -> bool:
            standing, spent = await store.get_many([key, day])
            now, evidence = self._clock(), self.open(key, standing)
            more = evidence.with_right(tag, now)
            left = (self._opened(day, spent, unpack_day) or TenantDay()).with_one(now)
            if more is evidence or left is None:
                self._context.counter.count("semantic_observed", "uncounted")
                return True
            return await self._swap(day, spent, left) and await self._swap(key, standing, more)

        await self._tried(once)

    async def _tried(self, once: Callable[[], Awaitable[bool]]) -> None:
        async with self._adding:
            for _ in range(_TRIES):
                if await once():
                    return
        raise StoreFault("evidence that changes too often")

    async def _swap(self, key: CacheKey, standing: bytes | None, value: Evidence | TenantDay) -> bool:
        sealed = self._context.envelope.seal(key, value.packed())
        return sealed is None or await self._context.store.swap(key, standing, sealed, KEPT)

    def _opened(self, key: CacheKey, sealed: bytes | None, unpack: Callable[[bytes], T | None]) -> T | None:
        data = None if sealed is None else self._context.envelope.open(key, sealed)
        found = None if data is None else unpack(data)
        if data is not None and found is None:
            self._context.counter.count("cache_rejected", "schema")
        return found

    def _tag(self, tenant: str, caller: str) -> bytes:
        return bytes.fromhex(self._context.partitions.digest(tenant, b"caller", caller.encode()))[:TAG_BYTES]
