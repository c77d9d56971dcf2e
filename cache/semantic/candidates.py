"""Maintains this process's vector indexes, one per partition, and follows the store. An index is only a hint: the store
is read before a finding counts, so that a deletion or an expiry acts on every replica at once. One thread embeds, adds
and searches; nothing else touches an index."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from cache.api import CacheKey, EntryKind, StoreFault
from cache.seal.context import CacheContext
from cache.semantic.embedder import Embedder, Vector
from cache.semantic.entry import Stored, unpack_entry
from cache.semantic.index import VectorIndex

T = TypeVar("T")

PAGE = 64  # new entries that a lookup reads along the way; the rest follow in the background
RESYNC_EVERY = 5.0  # seconds between attempts to find what an index lacks
MOST_INDEXES = 1024  # one a context: conversations with different histories have different ones
RECENT = 256  # vectors of the latest lookups, which are wanted again when their answers are stored


@dataclass(slots=True, eq=False)
class CandidateIndex:
    directory: CacheKey
    vectors: VectorIndex
    cursor: float = 0.0
    resynced_at: float = field(default_factory=time.monotonic)
    following: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class Nearest:
    vector: Vector
    found: list[tuple[str, float]]  # digest and similarity, best first
    changes: int


class CandidateStore:
    """With too many vectors, drops the least recently used index."""

    def __init__(self, context: CacheContext, embedder: Embedder, max_indexed: int) -> None:
        self._context = context
        self._embedder = embedder
        self._max_indexed = max_indexed
        self._indexes: OrderedDict[str, CandidateIndex] = OrderedDict()
        self._worker = ThreadPoolExecutor(1, "semantic")
        self._recent: OrderedDict[str, Vector] = OrderedDict()

    def begin(self, text: str, bounds: tuple[int, int], unfit: Callable[[str], bool]) -> Callable[[], object]:
        """Embeds ahead of a lookup, unless the text is unfit. Calling the result cancels what has not begun."""

        def work() -> None:
            if not unfit(text):
                self._embed(text, *bounds)

        return self._worker.submit(work).cancel

    async def embed(self, text: str, least: int, most: int) -> Vector | None:
        """None where the text is too short or too long to be trusted."""
        return await self._on_worker(partial(self._embed, text, least, most))

    def index(self, directory: CacheKey) -> CandidateIndex:
        index = self._indexes.get(directory.name)
        if index is None:
            index = self._indexes[directory.name] = CandidateIndex(directory, VectorIndex(self._embedder.width))
        self._indexes.move_to_end(directory.name)
        while len(self._indexes) > 1 and self._full():
            _, forgotten = self._indexes.popitem(last=False)
            if forgotten.following is not None:
                forgotten.following.cancel()
        return index

    def _full(self) -> bool:
        indexed = sum(len(each.vectors) for each in self._indexes.values())
        return len(self._indexes) > MOST_INDEXES or indexed > self._max_indexed

    async def follow(self, index: CandidateIndex, within: float | None) -> None:
        """Reads what is new. Raises StoreFault."""
        if index.following is not None and not index.following.done():
            return
        if await self._page(index, PAGE, within):
            index.following = asyncio.get_running_loop().create_task(self._catch_up(index), name="semantic follow")

    async def nearest(self, index: CandidateIndex, text: str, bounds: tuple[int, int], count: int) -> Nearest | None:
        """Visits the thread once; None as `embed`."""

        def work() -> Nearest | None:
            vector = self._embed(text, *bounds)
            if vector is None:
                return None
            return Nearest(vector, index.vectors.search(vector, count), index.vectors.changes)

        return await self._on_worker(work)

    async def refreshed(self, index: CandidateIndex, nearest: Nearest, count: int) -> Nearest:
        """Searches again if entries were added since."""
        if nearest.changes == index.vectors.changes:
            return nearest
        found = await self._on_worker(partial(index.vectors.search, nearest.vector, count))
        return Nearest(nearest.vector, found, index.vectors.changes)

    async def add(self, index: CandidateIndex, digest: str, vector: Vector) -> None:
        await self._on_worker(partial(index.vectors.add, digest, vector))

    async def drop(self, index: CandidateIndex, digests: Sequence[str]) -> None:
        def work() -> None:
            for digest in digests:
                index.vectors.remove(digest)

        await self._on_worker(work)

    def open(self, key: CacheKey, sealed: bytes) -> Stored | None:
        """Returns None, counted, where anything is unexpected."""
        data = self._context.envelope.open(key, sealed)
        stored = None if data is None else unpack_entry(data, self._embedder.width, key.digest[-64:])
        if data is not None and stored is None:
            self.reject()
        return stored

    def reject(self) -> None:
        self._context.counter.count("cache_rejected", "schema")

    async def aclose(self) -> None:
        for index in self._indexes.values():
            if index.following is not None:
                index.following.cancel()
        await asyncio.gather(*(s.following for s in self._indexes.values() if s.following), return_exceptions=True)
        self._indexes.clear()
        self._worker.shutdown(wait=True, cancel_futures=True)

    async def _catch_up(self, index: CandidateIndex) -> None:
        try:
            more = True
            while more:
                more = await self._page(index, 4 * PAGE, None)
        except StoreFault:
            self._context.counter.count("semantic_follow", "fault")

    async def _page(self, index: CandidateIndex, size: int, within: float | None) -> bool:
        begun = time.monotonic()
        page = await self._context.store.members(index.directory, index.cursor, size, within)
        missing = [digest for digest, _ in page.members if digest not in index.vectors]
        if missing:
            keys = [CacheKey(EntryKind.SEMANTIC, index.directory.partition, digest) for digest in missing]
            left = None if within is None else within - (time.monotonic() - begun)
            values = await self._context.store.get_many(keys, left)
            vectors = {key.digest: self._vector(key, sealed) for key, sealed in zip(keys, values, strict=True)}
            await self._on_worker(partial(_add_all, index.vectors, vectors))
        if page.cursor > index.cursor:
            index.cursor = page.cursor
        elif page.total > len(index.vectors) and time.monotonic() - index.resynced_at > RESYNC_EVERY:
            # An entry was missed or cannot be read, or the directory was lost and begun again.
            index.cursor, index.resynced_at = 0.0, time.monotonic()
            self._context.counter.count("semantic_follow", "resync")
            return True
        return page.more

    def _vector(self, key: CacheKey, sealed: bytes | None) -> Vector | None:
        stored = None if sealed is None else self.open(key, sealed)
        if stored is None:
            return None
        vector = stored.vector()
        if vector is None:
            self.reject()
        return vector

    def _embed(self, text: str, least: int, most: int) -> Vector | None:
        vector = self._recent.get(text)
        if vector is None:
            if not least <= self._embedder.tokens(text) <= most:
                return None
            vector = self._recent[text] = self._embedder.embed(text)
            if len(self._recent) > RECENT:
                self._recent.popitem(last=False)
        return vector

    async def _on_worker(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)


def _add_all(index: VectorIndex, vectors: dict[str, Vector | None]) -> None:
    for digest, vector in vectors.items():
        if vector is not None:
            index.add(digest, vector)
