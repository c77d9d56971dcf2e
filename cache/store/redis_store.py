"""The store that replicas share: plain Redis 7, no modules."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from cache.api import (
    DIRECTORY_MEMBERS,
    BreakerState,
    CacheKey,
    Counter,
    DirectoryPage,
    EntryKind,
    RedisSettings,
    is_name,
)
from cache.store.redis_link import Command, OddReply, RedisLink, ignored, of_another_type, reply_as
from cache.store.redis_open import RedisEndpoint
from cache.store.redis_replies import HEADER, ReplyBounds
from cache.store.writer import QueuedWrite, WriteQueue

CLOSE_WITHIN = 1.0
SCAN_COUNT = 256
NAMES = 16 * SCAN_COUNT  # the most names of one page; SCAN visits SCAN_COUNT buckets, each with a few names
NAME = 256  # mean bytes of a name, or of a member with its cursor

LAST_CURSOR = 2**53 - 1

# A member's cursor is the server's clock in microseconds, made to grow: exact in a double until the year 2255. What
# cannot be a cursor would hide all that comes after it.
ADD_MEMBER = f"""
if redis.call('TYPE', KEYS[1]).ok ~= 'zset' then redis.call('DEL', KEYS[1]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '({LAST_CURSOR}', '+inf')
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '0')
local now = redis.call('TIME')
local cursor = now[1] * 1000000 + now[2]
local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')
if last[2] and cursor <= tonumber(last[2]) then cursor = tonumber(last[2]) + 1 end
redis.call('ZADD', KEYS[1], string.format('%.0f', cursor), ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - tonumber(ARGV[2]))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""

# A value of another type is none of ours, and is written over.
SWAP = """
local standing = redis.pcall('GET', KEYS[1])
if type(standing) == 'table' then standing = false end
if (standing or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""


class RedisStore:
    """Lookups, bulk and scans have pools of their own: a large value blocks no small one."""

    def __init__(self, settings: RedisSettings, counter: Counter, members: int = DIRECTORY_MEMBERS) -> None:
        self._settings = settings
        self._members = members  # of a directory; the oldest goes first
        self._counter = counter
        self.server = RedisEndpoint(settings)
        self._small = RedisLink(self.server, settings.budget, "small", counter)
        self._bulk = RedisLink(self.server, settings.write_budget, "bulk", counter)
        self._admin = RedisLink(self.server, settings.admin_budget, "admin", counter)
        self._queue = WriteQueue(self._flush, settings.queue_items, settings.queue_bytes, counter)
        self._random = random.Random()

    @property
    def states(self) -> Mapping[str, BreakerState]:
        return {**self._small.states, **self._bulk.states, **self._admin.states}

    @property
    def queued(self) -> int:
        return self._queue.held

    @property
    def link(self) -> RedisLink:
        """Carries single-flight's leases and streams, which are small and urgent too."""
        return self._small

    async def get_many(self, keys: Sequence[CacheKey], within: float | None = None) -> tuple[bytes | None, ...]:
        """A key of another type is absent."""
        if not keys:
            return ()
        names = [key.name for key in keys]

        def parse(reply: object) -> tuple[bytes | None, ...]:
            values: list[bytes | None] = reply_as(reply, list[bytes | None])
            if len(values) != len(names):
                raise OddReply
            return tuple(values)

        return await self._small.read(lambda client: client.mget(names), parse, within, self._small.values(len(names)))

    async def set(self, key: CacheKey, value: bytes, ttl: float) -> None:
        await self._bulk.write(lambda client: client.set(key.name, value, px=self._milliseconds(ttl)), ignored)

    async def set_if_absent(self, key: CacheKey, value: bytes, ttl: float, within: float | None = None) -> bytes:
        """Takes one round trip. Replaces a value of another type."""
        lifetime = self._milliseconds(ttl)

        async def command(client: Redis) -> object:
            try:
                return await client.set(key.name, value, px=lifetime, nx=True, get=True)
            except ResponseError as error:
                if not of_another_type(error):
                    raise
                await client.set(key.name, value, px=lifetime)
                return None

        standing: bytes | None = await self._small.write(
            command, lambda reply: reply_as(reply, bytes | None), within, self._small.values(1)
        )
        return value if standing is None else standing

    async def swap(self, key: CacheKey, old: bytes | None, value: bytes, ttl: float) -> bool:
        arguments = (1, key.name, old or b"", value, self._milliseconds(ttl))
        return bool(await self._bulk.write(lambda client: client.eval(SWAP, *arguments), _number))

    def offer(self, key: CacheKey, value: bytes, ttl: float, directory: CacheKey | None = None) -> bool:
        return self._queue.offer(QueuedWrite(key, value, ttl, directory))

    async def delete_many(self, keys: Sequence[CacheKey]) -> int:
        if not keys:
            return 0
        names = [key.name for key in keys]
        return await self._bulk.write(lambda client: client.unlink(*names), _number)

    async def scan(self, kind: EntryKind, partition: str) -> AsyncIterator[CacheKey]:
        """Walks the whole database: for administrators, not for requests. Leaves out foreign names."""
        cursor = 0
        while True:
            cursor, names = await self._admin.read(
                self._page(cursor, f"{kind.value}:{partition}:*"), _scanned, shape=_listing(NAMES)
            )
            for name in names:
                digest = name.rpartition(b":")[2].decode("ascii", "replace")
                if is_name(digest):
                    yield CacheKey(kind, partition, digest)
            if cursor == 0:
                return

    async def members(
        self, directory: CacheKey, after: float, count: int, within: float | None = None
    ) -> DirectoryPage:

        async def command(client: Redis) -> object:
            async with client.pipeline(transaction=False) as pipe:
                pipe.zrangebyscore(directory.name, f"({after:.0f}", LAST_CURSOR, start=0, num=count, withscores=True)
                pipe.zcard(directory.name)
                return await pipe.execute()

        found, total = await self._small.read(command, _listed, within, _listing(2 * count))
        members = tuple((name.decode("ascii", "replace"), cursor) for name, cursor in found)
        ours = tuple(member for member in members if is_name(member[0]))
        if len(ours) < len(members):
            self._counter.count("cache_rejected", "directory", len(members) - len(ours))
        return DirectoryPage(ours, total, members[-1][1] if members else after, len(members) == count)

    async def drained(self) -> None:
        await self._queue.drained()

    async def aclose(self) -> None:
        await self._queue.aclose(CLOSE_WITHIN)
        for link in (self._small, self._bulk, self._admin):
            await link.aclose()
        await self.server.aclose()

    async def _flush(self, writes: Sequence[QueuedWrite]) -> None:
        async def command(client: Redis) -> object:
            async with client.pipeline(transaction=False) as pipe:
                for write in writes:
                    ttl = self._milliseconds(write.ttl)
                    pipe.set(write.key.name, write.value, px=ttl)
                    if write.directory is not None:
                        pipe.eval(ADD_MEMBER, 1, write.directory.name, write.key.digest, self._members, ttl)
                return await pipe.execute()

        await self._bulk.write(command, ignored)

    @staticmethod
    def _page(cursor: int, pattern: str) -> Command:
        return lambda client: client.scan(cursor=cursor, match=pattern, count=SCAN_COUNT)

    def _milliseconds(self, ttl: float) -> int:
        share = self._settings.jitter
        return max(1, round(1000 * ttl * self._random.uniform(1 - share, 1 + share)))


def _listing(count: int) -> ReplyBounds:
    return ReplyBounds(4 + count, (1 << 16) + count * (NAME + HEADER))


def _number(reply: object) -> int:
    number: int = reply_as(reply, int)
    return number


def _scanned(reply: object) -> tuple[int, list[bytes]]:
    cursor, names = reply_as(reply, tuple[bytes, list[bytes]])
    return int(cursor), names


def _listed(reply: object) -> tuple[list[tuple[bytes, float]], int]:
    flat, total = reply_as(reply, tuple[list[bytes], int])
    cursors = [float(score) for score in flat[1::2]]
    if len(cursors) * 2 != len(flat):
        raise OddReply
    return list(zip(flat[::2], cursors, strict=True)), total
