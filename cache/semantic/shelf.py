"""The indexes of this process, one a partition, and how they follow the store. An index is only a hint: whatever it
finds is read again from the store before it counts, so that a deletion or an expiry acts on every replica at once.

Embedding, adding and searching happen on one thread of their own; nothing else touches an index.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from cache.api import CacheKey, Kind, StoreFault
from cache.seal.context import Ground
from cache.semantic.embedder import Embedder, Vector
from cache.semantic.entry import Stored, unpack_entry
from cache.semantic.index import VectorIndex

T = TypeVar("T")

PAGE = 64  # new entries that a lookup reads along the way; the rest follow in the background
RESYNC_EVERY = 5.0  # seconds between attempts to find what an index lacks
MOST_SHELVES = 1024  # each conversation's history has its own
RECENT = 256  # vectors of texts that were just looked up, for storing them


@dataclass(slots=True, eq=False)
class Shelf:
    """One partition's index, and how far it has followed the directory."""

    directory: CacheKey
    index: VectorIndex
    cursor: float = 0.0
    resynced_at: float = field(default_factory=time.monotonic)
    following: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class Nearest:
    """What a search found, and as of which state of the index."""

    vector: Vector
    found: list[tuple[str, float]]  # digest and similarity, best first
    changes: int


class Shelves:
    """All of them, the least recently used forgotten when there are too many vectors."""

    def __init__(self, ground: Ground, embedder: Embedder, max_indexed: int) -> None:
        self._ground = ground
        self._embedder = embedder
        self._max_indexed = max_indexed
        self._shelves: OrderedDict[str, Shelf] = OrderedDict()
        self._worker = ThreadPoolExecutor(1, "semantic")
        self._recent: OrderedDict[str, Vector] = OrderedDict()

    def begin(self, text: str, bounds: tuple[int, int], unfit: Callable[[str], bool]) -> Callable[[], object]:
        """Embeds on the way, for whoever asks next, unless the text is unfit. The result gives it up, where it has not
        begun yet."""

        def work() -> None:
            if not unfit(text):
                self._embed(text, *bounds)

        return self._worker.submit(work).cancel

    async def embed(self, text: str, least: int, most: int) -> Vector | None:
        """None where the text is too short or too long for the embedder to be trusted."""
        return await self._on_worker(partial(self._embed, text, least, most))

    def shelf(self, directory: CacheKey) -> Shelf:
        """The one that follows a directory."""
        shelf = self._shelves.get(directory.name)
        if shelf is None:
            shelf = self._shelves[directory.name] = Shelf(directory, VectorIndex(self._embedder.width))
        self._shelves.move_to_end(directory.name)
        while len(self._shelves) > 1 and self._full():
            _, forgotten = self._shelves.popitem(last=False)
            if forgotten.following is not None:
                forgotten.following.cancel()
        return shelf

    def _full(self) -> bool:
        indexed = sum(len(each.index) for each in self._shelves.values())
        return len(self._shelves) > MOST_SHELVES or indexed > self._max_indexed

    async def follow(self, shelf: Shelf, within: float | None) -> None:
        """Reads what is new. Raises StoreFault."""
        if shelf.following is not None and not shelf.following.done():
            return
        if await self._page(shelf, PAGE, within):
            shelf.following = asyncio.get_running_loop().create_task(self._catch_up(shelf), name="semantic follow")

    async def nearest(self, shelf: Shelf, text: str, bounds: tuple[int, int], count: int) -> Nearest | None:
        """Embeds and searches in one go; None where the text is too short or too long."""

        def work() -> Nearest | None:
            vector = self._embed(text, *bounds)
            return None if vector is None else Nearest(vector, shelf.index.search(vector, count), shelf.index.changes)

        return await self._on_worker(work)

    async def refreshed(self, shelf: Shelf, nearest: Nearest, count: int) -> Nearest:
        """The same, searched again if entries came in the meantime."""
        if nearest.changes == shelf.index.changes:
            return nearest
        found = await self._on_worker(partial(shelf.index.search, nearest.vector, count))
        return Nearest(nearest.vector, found, shelf.index.changes)

    async def add(self, shelf: Shelf, digest: str, vector: Vector) -> None:
        """An entry that this process writes itself."""
        await self._on_worker(partial(shelf.index.add, digest, vector))

    async def drop(self, shelf: Shelf, digests: Sequence[str]) -> None:
        """Entries that turned out to be gone."""

        def work() -> None:
            for digest in digests:
                shelf.index.remove(digest)

        await self._on_worker(work)

    def open(self, key: CacheKey, sealed: bytes) -> Stored | None:
        """None, counted, where anything is unexpected."""
        data = self._ground.envelope.open(key, sealed)
        stored = None if data is None else unpack_entry(data, self._embedder.width, key.digest[-64:])
        if data is not None and stored is None:
            self.reject()
        return stored

    def reject(self) -> None:
        """Counts what is not as it should be."""
        self._ground.counter.count("cache_rejected", "schema")

    async def aclose(self) -> None:
        """Ends what runs."""
        for shelf in self._shelves.values():
            if shelf.following is not None:
                shelf.following.cancel()
        await asyncio.gather(*(s.following for s in self._shelves.values() if s.following), return_exceptions=True)
        self._shelves.clear()
        self._worker.shutdown(wait=True, cancel_futures=True)

    async def _catch_up(self, shelf: Shelf) -> None:
        try:
            more = True
            while more:
                more = await self._page(shelf, 4 * PAGE, None)
        except StoreFault:
            self._ground.counter.count("semantic_follow", "fault")

    async def _page(self, shelf: Shelf, size: int, within: float | None) -> bool:
        """Whether there may be more."""
        begun = time.monotonic()
        page = await self._ground.store.enrolled(shelf.directory, shelf.cursor, size, within)
        missing = [digest for digest, _ in page.members if digest not in shelf.index]
        if missing:
            keys = [CacheKey(Kind.SEMANTIC, shelf.directory.partition, digest) for digest in missing]
            left = None if within is None else within - (time.monotonic() - begun)
            values = await self._ground.store.get_many(keys, left)
            vectors = {key.digest: self._vector(key, sealed) for key, sealed in zip(keys, values, strict=True)}
            await self._on_worker(partial(_add_all, shelf.index, vectors))
        if page.members:
            shelf.cursor = page.members[-1][1]
        elif page.total > len(shelf.index) and time.monotonic() - shelf.resynced_at > RESYNC_EVERY:
            # Something was missed, or cannot be read; a directory that was lost and begun again looks like this too.
            shelf.cursor, shelf.resynced_at = 0.0, time.monotonic()
            self._ground.counter.count("semantic_follow", "resync")
            return True
        return len(page.members) == size

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
