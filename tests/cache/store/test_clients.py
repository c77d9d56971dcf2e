"""A connection is closed whenever its lookup gives up."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from cache.api import RedisSettings
from cache.store.redis_link import Clients
from cache.store.redis_open import Client, RedisEndpoint
from cache.store.redis_parser import Expected


class Redis:
    """Knows whether it was closed."""

    def __init__(self) -> None:
        self.closed = False

    async def aclose(self, close_connection_pool: bool) -> None:
        self.closed = close_connection_pool


class Server:
    """Connects within two turns of the loop."""

    def __init__(self) -> None:
        self.settings = RedisSettings(url="redis://127.0.0.1")
        self.made: list[Redis] = []

    async def client(self, wait: float) -> Client:
        await asyncio.sleep(0)
        self.made.append(Redis())
        return Client(cast(Any, self.made[-1]), cast(Expected, None))


@pytest.mark.parametrize("turns", range(8))
async def test_a_connection_that_comes_as_its_lookup_gives_up_is_closed(turns: int) -> None:
    server = Server()
    clients = Clients(cast(RedisEndpoint, server), 0.0)

    async def lookup() -> None:
        try:
            async with clients.one():
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            await clients.aclose()  # before any callback has run

    task = asyncio.create_task(lookup())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert all(one.closed for one in server.made)
    assert bool(server.made) is (turns > 0)
