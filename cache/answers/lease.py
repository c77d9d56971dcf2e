"""Elects the replica that generates an answer: a lease in Redis with a fencing token and a heartbeat. The token names
the stream, so a holder that was paused past its lease writes without readers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from redis.asyncio import Redis

from cache.api import CacheKey, EntryKind, SingleFlightSettings, StoreFault
from cache.store.redis_link import NothingSentFault, RedisLink, ignored, reply_as

TOKEN_BYTES = 16
MESSAGES = 256  # read at once; each message is a list of its id and a list of a field and a value
MOST_RETURNING = 16  # at once; what is not given back runs out by itself

EXTEND = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


@dataclass(frozen=True, slots=True)
class Lease:
    key: CacheKey
    token: str

    @property
    def stream(self) -> CacheKey:
        return CacheKey(EntryKind.SHARED_GENERATION, self.key.partition, self.key.digest + self.token)


class Leases:
    """All methods raise StoreFault."""

    def __init__(self, urgent: RedisLink, patient: RedisLink, settings: SingleFlightSettings) -> None:
        self._urgent = urgent
        self._patient = patient  # for reads that block; its budget is longer than BLOCK
        self._settings = settings
        self._returning: set[asyncio.Task[None]] = set()

    async def take(self, answer: CacheKey, within: float | None = None) -> tuple[Lease, bool]:
        """The lease in force, and whether it was taken now. Without an answer in time it may have been taken all the
        same, and is given back."""
        key = CacheKey(EntryKind.LEASE, answer.partition, answer.digest)
        token = secrets.token_hex(TOKEN_BYTES)
        lease = round(1000 * self._settings.lease)
        try:
            standing: bytes | None = await self._urgent.write(
                lambda client: client.set(key.name, token, px=lease, nx=True, get=True),
                lambda reply: reply_as(reply, bytes | None),
                within,
                self._urgent.values(1),
            )
        except NothingSentFault:
            raise
        except StoreFault:
            self._return(Lease(key, token))
            raise
        if standing is None:
            return Lease(key, token), True
        held = standing.decode("ascii", "replace")
        try:
            lease_held = Lease(key, held)
            _ = lease_held.stream
        except ValueError:
            raise StoreFault("a lease that is not one") from None
        return lease_held, False

    async def holds(self, lease: Lease) -> bool:
        token = lease.token.encode()
        return await self._urgent.read(
            lambda client: client.get(lease.key.name), lambda reply: reply == token, shape=self._urgent.values(1)
        )

    async def extend(self, lease: Lease) -> bool:
        """False where it is lost."""
        arguments = (1, lease.key.name, lease.token, round(1000 * self._settings.lease))
        return await self._urgent.write(lambda client: client.eval(EXTEND, *arguments), lambda reply: reply == 1)

    async def release(self, lease: Lease) -> None:
        """Lets another replica begin at once."""
        await self._urgent.write(lambda client: client.eval(RELEASE, 1, lease.key.name, lease.token), ignored)

    async def aclose(self) -> None:
        if self._returning:
            await asyncio.wait(self._returning)

    def _return(self, lease: Lease) -> None:
        if len(self._returning) < MOST_RETURNING:
            task = asyncio.get_running_loop().create_task(self._returned(lease), name="return of a lease")
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)

    async def _returned(self, lease: Lease) -> None:
        with suppress(StoreFault):
            await self._patient.write(lambda client: client.eval(RELEASE, 1, lease.key.name, lease.token), ignored)

    async def append(self, lease: Lease, items: Sequence[bytes]) -> None:
        retention = round(1000 * self._settings.retention)

        async def command(client: Redis) -> object:
            async with client.pipeline(transaction=False) as pipe:
                for item in items:
                    pipe.xadd(lease.stream.name, {"c": item})
                pipe.pexpire(lease.stream.name, retention)
                return await pipe.execute()

        await self._urgent.write(command, ignored)

    async def read(self, lease: Lease, after: str, block: float) -> tuple[str, Sequence[bytes]]:
        """New messages and the place of the last; waits `block` for the first."""
        milliseconds = max(1, round(1000 * block))
        entries = await self._patient.read(
            lambda client: client.xread({lease.stream.name: after}, count=MESSAGES, block=milliseconds),
            _entries,
            shape=self._patient.values(MESSAGES, more=5 * (1 + MESSAGES)),
        )
        if not entries:
            return after, ()
        return entries[-1][0], [item for _, item in entries]


def _entries(reply: object) -> list[tuple[str, bytes]]:
    streams = reply_as(reply, list[tuple[bytes, list[tuple[bytes, list[bytes]]]]] | None) or []
    found: list[tuple[str, bytes]] = []
    for _, entries in streams[:1]:
        for place, fields in entries:
            messages = dict(zip(fields[::2], fields[1::2], strict=False))
            found.append((place.decode("ascii", "replace"), messages.get(b"c", b"")))
    return found
