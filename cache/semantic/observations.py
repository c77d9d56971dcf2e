"""Evidence in the store: sealed like every other value, one value a kind of difference, changed by compare-and-set.

What tells two questions apart is the kind: the words that only one of them has, and whether the others are moved. So
`quickly`, seen to be harmless three hundred times, speaks for `quickly` and for nothing else.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from cache.api import CacheKey, Kind, StoreFault
from cache.seal.context import CacheContext
from cache.seal.partition import encode
from cache.semantic.canonical import Canonical, canonical
from cache.semantic.evidence import TAG_BYTES, Evidence, unpack_evidence

DIRECTORY_DIGITS = 32  # of an entry's digest, which begins with its directory's
_TRIES = 4  # to add to a value that another replica changes at the same time


def difference(one: str, other: str) -> tuple[tuple[tuple[str, ...], ...], bool]:
    """What tells two questions apart, the same from either side: the words of each that the other lacks, with their
    articles, and whether the rest stands in another order."""
    a, b = _spoken(canonical(one)), _spoken(canonical(other))
    mine, theirs = Counter(a) - Counter(b), Counter(b) - Counter(a)
    moved = [word for word in a if word not in mine] != [word for word in b if word not in theirs]
    return tuple(sorted((tuple(sorted(mine.elements())), tuple(sorted(theirs.elements()))))), moved


def _spoken(words: Canonical) -> list[str]:
    return [f"{article} {word}" for article, word in zip(words.articles, words.words, strict=True)]


class Observations:
    """Names, reads and adds to evidence."""

    def __init__(self, context: CacheContext, ttl: float) -> None:
        self._context = context
        self.ttl = ttl
        self._adding = asyncio.Lock()  # within a process nobody need try twice

    def strict(self, entry: CacheKey) -> CacheKey:
        """Of all pairs of equal words in an entry's directory."""
        return CacheKey(Kind.EVIDENCE, entry.partition, entry.digest[:DIRECTORY_DIGITS])

    def learned(self, tenant: str, entry: CacheKey, one: str, other: str) -> CacheKey:
        """Of all pairs in an entry's directory that differ as these two do."""
        kind = self._context.partitions.digest(tenant, b"difference", encode(difference(one, other)))
        return CacheKey(Kind.EVIDENCE, entry.partition, entry.digest[:DIRECTORY_DIGITS] + kind[:DIRECTORY_DIGITS])

    def wrongs(self, entry: CacheKey, strict: bool) -> CacheKey:
        """Of an entry: how often its answer would have been wrong."""
        return CacheKey(Kind.EVIDENCE, entry.partition, entry.digest + ("01" if strict else "00"))

    def open(self, key: CacheKey, sealed: bytes | None) -> Evidence:
        """Nothing, counted, where the value is damaged or not ours."""
        data = None if sealed is None else self._context.envelope.open(key, sealed)
        if data is None:
            return Evidence()
        found = unpack_evidence(data)
        if found is None:
            self._context.counter.count("cache_rejected", "schema")
        return found or Evidence()

    async def read(self, keys: Sequence[CacheKey], within: float | None) -> tuple[Evidence, ...]:
        """Raises StoreFault."""
        values = await self._context.store.get_many(keys, within)
        return tuple(map(self.open, keys, values))

    async def add(self, key: CacheKey, tenant: str, caller: str, right: bool) -> None:
        """One observation more. Raises StoreFault."""
        tag = bytes.fromhex(self._context.partitions.digest(tenant, b"caller", caller.encode()))[:TAG_BYTES]
        async with self._adding:
            for _ in range(_TRIES):
                (standing,) = await self._context.store.get_many([key])
                more = self.open(key, standing).with_one(tag, right)
                sealed = self._context.envelope.seal(key, more.packed())
                if sealed is None or await self._context.store.swap(key, standing, sealed, self.ttl):
                    return
        raise StoreFault("evidence that changes too often")
