"""A proxy that misbehaves, and both stores under one fixture."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from bench.redis_server import Proxy, RedisServer, free_port
from cache.api import RedisSettings, Store
from cache.open.counters import Counters
from cache.seal.keyring import Keyring
from cache.store.memory import MemoryStore
from cache.store.redis_store import RedisStore


@pytest.fixture
async def make_proxy() -> AsyncIterator[Callable[[int], object]]:
    proxies: list[Proxy] = []

    async def make(target: int) -> Proxy:
        proxies.append(await Proxy(target).start())
        return proxies[-1]

    yield make
    for proxy in proxies:
        await proxy.stop()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def keyring() -> Keyring:
    return Keyring.generate()


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.product)])
async def store(request: pytest.FixtureRequest, counters: Counters) -> AsyncIterator[Store]:
    """Each of the two stores. The Redis one has a roomy budget: here it is about what it says, not when."""
    if request.param == "memory":
        yield MemoryStore(64 * 2**20)
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    made = RedisStore(RedisSettings(url=server.url, budget=20.0, write_budget=20.0, jitter=0.0), counters)
    yield made
    await made.aclose()


@pytest.fixture
def unused_port() -> int:
    return free_port()
