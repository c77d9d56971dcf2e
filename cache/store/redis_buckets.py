"""Token buckets in Redis. A bucket is one short string, `level instant`, and every use of it one script."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from cache.api import BreakerState, BucketSize, CacheKey, Counter, EntryKind, Grant, RedisSettings
from cache.store.redis_link import OddReply, RedisLink, reply_as
from cache.store.redis_open import RedisEndpoint
from cache.store.redis_replies import ReplyBounds

GRANT = ReplyBounds(elements=3)
DEBT = 86_400.0  # seconds of filling; the most that a bucket can be owed, or a forged value can close it for

# ARGV: filled per second, most that it holds, owed, wanted, most that it can be owed. What no bucket can contain, and
# an instant in the future, count as a full bucket of now. Lua compares nothing with NaN, so NaN is neither.
SETTLE = """
local rate, most, owed, wanted, debt = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]),
    tonumber(ARGV[5])
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
local text = redis.pcall('GET', KEYS[1])
if type(text) ~= 'string' then text = '' end
local level, since = string.match(text, '^(-?[%d.]+) ([%d.]+)$')
level, since = tonumber(level or ''), tonumber(since or '')
if not (level and since and since <= now) then level, since = most, now end
level = math.min(most, math.max(-debt, level) + rate * (now - since))
level = math.max(-debt, level - owed)
local granted = math.min(wanted, math.max(0, math.floor(level)))
level = math.min(most, level - granted)
local full = math.ceil((most - level) / rate) + 1
redis.call('SET', KEYS[1], string.format('%.3f %.6f', level, now), 'EX', string.format('%.0f', full))
return {string.format('%.3f', granted), string.format('%.3f', level)}
"""


class RedisBuckets:
    """Tenants' names are hidden with the secret `names`; where that is empty, they are hashed."""

    def __init__(self, settings: RedisSettings, names: bytes, counter: Counter) -> None:
        self._names = names
        self._server = RedisEndpoint(settings)
        self._link = RedisLink(self._server, settings.budget, "quota", counter)
        self.budget = settings.budget

    @property
    def states(self) -> Mapping[str, BreakerState]:
        return {name: state for name, state in self._link.states.items() if name.endswith("writes")}

    async def settle(self, tenant: str, size: BucketSize, owed: float, wanted: float) -> Grant:
        arguments = [f"{value:.6f}" for value in (size.per_second, size.most, owed, wanted, DEBT * size.per_second)]
        name = self._name(tenant)
        return await self._link.write(lambda client: client.eval(SETTLE, 1, name, *arguments), _grant, shape=GRANT)

    async def aclose(self) -> None:
        await self._link.aclose()
        await self._server.aclose()

    def _name(self, tenant: str) -> str:
        digest = hashlib.blake2b(tenant.encode(), key=self._names, digest_size=32, person=b"whippet quota").hexdigest()
        return CacheKey(EntryKind.QUOTA, digest[:32], digest[32:]).name


def _grant(reply: object) -> Grant:
    numbers: list[bytes] = reply_as(reply, list[bytes])
    try:
        granted, level = map(float, numbers)
    except ValueError:
        raise OddReply from None
    return Grant(granted, level)
