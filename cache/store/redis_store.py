"""The store that replicas share: plain Redis 7, no modules."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

from redis.asyncio import Redis

from cache.api import DIRECTORY_MEMBERS, BreakerState, CacheKey, Counter, DirectoryPage, Kind, RedisSettings
from cache.store.redis_link import Link
from cache.store.writer import Write, WriteQueue

CLOSE_WITHIN = 1.0
SCAN_COUNT = 1000

# A member's cursor is the server's clock in microseconds, made to grow: exact in a double until the year 2255.
ADD_MEMBER = """
local now = redis.call('TIME')
local cursor = now[1] * 1000000 + now[2]
local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')
if last[2] and cursor <= tonumber(last[2]) then cursor = tonumber(last[2]) + 1 end
redis.call('ZADD', KEYS[1], string.format('%.0f', cursor), ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - tonumber(ARGV[2]))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""


class RedisStore:
    """A `Store` in Redis. Lookups, bulk and scans have pools of their own: a large value blocks no small one."""

    def __init__(self, settings: RedisSettings, counter: Counter, members: int = DIRECTORY_MEMBERS) -> None:
        self._settings = settings
        self._members = members  # of a directory; the oldest goes first
        self._small = Link(settings, settings.budget, "small", counter)
        self._bulk = Link(settings, settings.write_budget, "bulk", counter)
        self._admin = Link(settings, settings.admin_budget, "admin", counter)
        self._queue = WriteQueue(self._flush, settings.queue_items, settings.queue_bytes, counter)
        self._random = random.Random()

    @property
    def states(self) -> Mapping[str, BreakerState]:
        """Of every breaker, by name."""
        return {**self._small.states, **self._bulk.states, **self._admin.states}

    @property
    def queued(self) -> int:
        """Bytes that wait to be written."""
        return self._queue.held

    @property
    def link(self) -> Link:
        """For leases and streams of single-flight, which are small and urgent too."""
        return self._small

    async def get_many(self, keys: Sequence[CacheKey], within: float | None = None) -> tuple[bytes | None, ...]:
        """A key of another type counts as absent."""
        if not keys:
            return ()
        names = [key.name for key in keys]
        values = await self._small.read(lambda client: client.mget(names), within)
        return tuple(cast("list[bytes | None]", values))

    async def set(self, key: CacheKey, value: bytes, ttl: float) -> None:
        await self._bulk.write(lambda client: client.set(key.name, value, px=self._milliseconds(ttl)))

    async def set_if_absent(self, key: CacheKey, value: bytes, ttl: float, within: float | None = None) -> bytes:
        """In one round trip."""
        standing = await self._small.write(
            lambda client: client.set(key.name, value, px=self._milliseconds(ttl), nx=True, get=True), within
        )
        return value if standing is None else cast("bytes", standing)

    def offer(self, key: CacheKey, value: bytes, ttl: float, directory: CacheKey | None = None) -> bool:
        return self._queue.offer(Write(key, value, ttl, directory))

    async def delete_many(self, keys: Sequence[CacheKey]) -> int:
        if not keys:
            return 0
        names = [key.name for key in keys]
        return int(await self._bulk.write(lambda client: client.unlink(*names)))

    async def scan(self, kind: Kind, partition: str) -> AsyncIterator[CacheKey]:
        """Walks the whole database: for administrators, not for requests."""
        cursor = 0
        while True:
            page = await self._admin.read(self._page(cursor, f"{kind.value}:{partition}:*"))
            cursor, names = int(page[0]), page[1]
            for name in names:
                yield CacheKey(kind, partition, name.decode().rpartition(":")[2])
            if cursor == 0:
                return

    async def members(
        self, directory: CacheKey, after: float, count: int, within: float | None = None
    ) -> DirectoryPage:

        async def command(client: Redis) -> list[Any]:
            async with client.pipeline(transaction=False) as pipe:
                pipe.zrangebyscore(directory.name, f"({after:.0f}", "+inf", start=0, num=count, withscores=True)
                pipe.zcard(directory.name)
                return await pipe.execute()

        members, total = await self._small.read(command, within)
        return DirectoryPage(tuple((member.decode(), float(score)) for member, score in members), int(total))

    async def add(self, key: CacheKey, amounts: Mapping[str, int], ttl: float) -> None:

        async def command(client: Redis) -> None:
            async with client.pipeline(transaction=False) as pipe:
                for name, amount in amounts.items():
                    pipe.hincrby(key.name, name, amount)
                pipe.pexpire(key.name, self._milliseconds(ttl))
                await pipe.execute()

        await self._bulk.write(command)

    async def counts(self, keys: Sequence[CacheKey], within: float | None = None) -> tuple[Mapping[str, int], ...]:
        return (await self.read((), keys, within))[1] if keys else ()

    async def read(
        self, keys: Sequence[CacheKey], counted: Sequence[CacheKey], within: float | None = None
    ) -> tuple[tuple[bytes | None, ...], tuple[Mapping[str, int], ...]]:
        """In one round trip."""

        async def command(client: Redis) -> list[Any]:
            async with client.pipeline(transaction=False) as pipe:
                for key in counted:
                    pipe.hgetall(key.name)
                if keys:
                    pipe.mget([key.name for key in keys])
                return await pipe.execute()

        if not keys and not counted:
            return (), ()
        rows = await self._small.read(command, within)
        values = cast("list[bytes | None]", rows.pop()) if keys else []
        return tuple(values), tuple({name.decode(): int(value) for name, value in row.items()} for row in rows)

    async def drained(self) -> None:
        """Returns when no write waits."""
        await self._queue.drained()

    async def aclose(self) -> None:
        """Writes what it can in a second, then drops the connections."""
        await self._queue.aclose(CLOSE_WITHIN)
        for link in (self._small, self._bulk, self._admin):
            await link.aclose()

    async def _flush(self, writes: Sequence[Write]) -> None:
        async def command(client: Redis) -> list[Any]:
            async with client.pipeline(transaction=False) as pipe:
                for write in writes:
                    ttl = self._milliseconds(write.ttl)
                    pipe.set(write.key.name, write.value, px=ttl)
                    if write.directory is not None:
                        pipe.eval(ADD_MEMBER, 1, write.directory.name, write.key.digest, self._members, ttl)
                return await pipe.execute()

        await self._bulk.write(command)

    @staticmethod
    def _page(cursor: int, pattern: str) -> Any:
        return lambda client: client.scan(cursor=cursor, match=pattern, count=SCAN_COUNT)

    def _milliseconds(self, ttl: float) -> int:
        share = self._settings.jitter
        return max(1, round(1000 * ttl * self._random.uniform(1 - share, 1 + share)))
