"""Stores entries in memory, within a bound of bytes, and drops the least recently used. Used from one event loop."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from cache.api import DIRECTORY_MEMBERS, CacheKey, DirectoryPage, EntryKind

OVERHEAD = 640  # bytes an entry costs beside name and value; tracemalloc says 622
MEMBER = 240  # bytes a member of a directory costs; tracemalloc says 225


@dataclass(slots=True)
class _StoredValue:
    key: CacheKey
    expires_at: float
    value: bytes = b""
    members: dict[str, float] = field(default_factory=dict)  # of a directory: digest → cursor, oldest first

    @property
    def size(self) -> int:
        return OVERHEAD + len(self.key.name) + len(self.value) + MEMBER * len(self.members)


class MemoryStore:
    """A bound of 0 keeps nothing."""

    def __init__(
        self, max_bytes: int, clock: Callable[[], float] = time.monotonic, members: int = DIRECTORY_MEMBERS
    ) -> None:
        self._max_bytes = max_bytes
        self._members = members  # of a directory; the oldest goes first
        self._clock = clock
        self._entries: OrderedDict[str, _StoredValue] = OrderedDict()
        self._bytes = 0
        self._cursor = 0.0

    @property
    def held(self) -> int:
        """Includes expired entries that no lookup has removed yet."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    async def get_many(self, keys: Sequence[CacheKey], within: float | None = None) -> tuple[bytes | None, ...]:
        found = [self._live(key) for key in keys]
        return tuple(None if entry is None else entry.value for entry in found)

    async def set(self, key: CacheKey, value: bytes, ttl: float) -> None:
        self._put(_StoredValue(key, self._clock() + ttl, value))

    async def set_if_absent(self, key: CacheKey, value: bytes, ttl: float, within: float | None = None) -> bytes:
        if entry := self._live(key):
            return entry.value
        self._put(_StoredValue(key, self._clock() + ttl, value))
        return value

    def offer(self, key: CacheKey, value: bytes, ttl: float, directory: CacheKey | None = None) -> bool:
        self._put(_StoredValue(key, self._clock() + ttl, value))
        if key.name not in self._entries:
            return False
        if directory is not None:
            self._add_member(directory, key.digest, ttl)
        return True

    async def delete_many(self, keys: Sequence[CacheKey]) -> int:
        found = [key for key in keys if self._live(key) is not None]
        for key in found:
            self._remove(key.name)
        return len(found)

    async def scan(self, kind: EntryKind, partition: str) -> AsyncIterator[CacheKey]:
        now = self._clock()
        found = [entry for entry in self._entries.values() if entry.key.kind is kind and entry.expires_at > now]
        for entry in found:
            if entry.key.partition == partition:
                yield entry.key

    async def members(
        self, directory: CacheKey, after: float, count: int, within: float | None = None
    ) -> DirectoryPage:
        entry = self._live(directory)
        if entry is None:
            return DirectoryPage((), 0, after, False)
        newer = list(takewhile(lambda member: member[1] > after, reversed(entry.members.items())))
        page = tuple(newer[::-1][:count])
        return DirectoryPage(page, len(entry.members), page[-1][1] if page else after, len(page) == count)

    async def swap(self, key: CacheKey, old: bytes | None, value: bytes, ttl: float) -> bool:
        entry = self._live(key)
        if (None if entry is None else entry.value) != old:
            return False
        self._put(_StoredValue(key, self._clock() + ttl, value))
        return True

    async def aclose(self) -> None:
        self._entries.clear()
        self._bytes = 0

    def _add_member(self, directory: CacheKey, digest: str, ttl: float) -> None:
        members = self._take(directory).members
        members.pop(digest, None)
        self._cursor += 1
        members[digest] = self._cursor
        if len(members) > self._members:
            members.pop(next(iter(members)))
        self._put(_StoredValue(directory, self._clock() + ttl, members=members))

    def _take(self, key: CacheKey) -> _StoredValue:
        entry = self._live(key) or _StoredValue(key, 0.0)
        self._remove(key.name)
        return entry

    def _live(self, key: CacheKey) -> _StoredValue | None:
        entry = self._entries.get(key.name)
        if entry is None:
            return None
        if entry.expires_at <= self._clock():
            self._remove(key.name)
            return None
        self._entries.move_to_end(key.name)
        return entry

    def _put(self, entry: _StoredValue) -> None:
        self._remove(entry.key.name)
        if entry.size > self._max_bytes:
            return
        self._entries[entry.key.name] = entry
        self._bytes += entry.size
        while self._bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))

    def _remove(self, name: str) -> None:
        if entry := self._entries.pop(name, None):
            self._bytes -= entry.size
