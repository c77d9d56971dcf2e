"""Writes behind requests: a bounded queue and the one task that empties it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from cache.api import CacheKey, Counter, StoreFault

BATCH = 32  # writes that go in one round trip


@dataclass(frozen=True, slots=True)
class QueuedWrite:
    key: CacheKey
    value: bytes
    ttl: float
    directory: CacheKey | None = None


class WriteQueue:
    """A write that fails is counted and not repeated."""

    def __init__(
        self, flush: Callable[[Sequence[QueuedWrite]], Awaitable[None]], items: int, max_bytes: int, counter: Counter
    ) -> None:
        self._flush = flush
        self._items = items
        self._max_bytes = max_bytes
        self._counter = counter
        self._queue: deque[QueuedWrite] = deque()
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def held(self) -> int:
        return self._bytes

    def offer(self, write: QueuedWrite) -> bool:
        """False where there is no room. Needs a running loop."""
        if len(self._queue) >= self._items or self._bytes + len(write.value) > self._max_bytes:
            self._counter.count("cache_write_dropped", write.key.kind.name.lower())
            return False
        self._queue.append(write)
        self._bytes += len(write.value)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._drain(), name="cache writes")
        return True

    async def drained(self) -> None:
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def aclose(self, within: float) -> None:
        """Writes what it can in `within` seconds and drops the rest."""
        task = self._task
        if task is not None and not task.done():
            await asyncio.wait([task], timeout=within)
            task.cancel()
            await asyncio.wait([task])
        self._queue.clear()
        self._bytes = 0

    async def _drain(self) -> None:
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            try:
                await self._flush(batch)
            except StoreFault:
                self._counter.count("cache_write_failed", amount=len(batch))
            finally:
                self._bytes -= sum(len(write.value) for write in batch)
