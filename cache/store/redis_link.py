"""Combines a pool of connections to Redis, its time budget, which cuts every wait, and its breakers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ReadOnlyError, ResponseError

from cache.api import BreakerState, Counter, StoreFault
from cache.store.breaker import Breaker
from cache.store.redis_open import Client, RedisEndpoint, close
from cache.store.redis_replies import HEADER, ReplyBounds

T = TypeVar("T")
Command = Callable[[Redis], Awaitable[object]]

SHORT = ReplyBounds()  # of a reply with a status, a number or a short value
STARVED = 0.002  # seconds; a wait shorter than this says nothing about the server
MEAN = 1 << 16  # bytes per value of a reply with more than two values; few values are as large as the largest
CONNECT = 1.0  # seconds that connecting may take, beyond the budget of the lookup that began it


class NothingSentFault(StoreFault):
    """The command was not sent, so it had no effect."""


class OddReply(Exception):
    pass


def reply_as(reply: object, shape: Any) -> Any:
    """Raises OddReply for another type."""
    try:
        return msgspec.convert(reply, shape)
    except msgspec.ValidationError:
        raise OddReply from None


def ignored(reply: object) -> None:
    """Accepts replies without information."""


def of_another_type(error: Exception) -> bool:
    """Whether the key holds a list, say: that concerns one key, every other error the server."""
    return isinstance(error, ResponseError) and "WRONGTYPE" in str(error)


class Clients:
    """Holds at most `connections` clients. One whose command was interrupted is closed: its late answer would be read
    as the next command's, and redis-py's own pool loses a connection whose release is cancelled. Connecting continues
    after a lookup that cannot wait for it."""

    def __init__(self, server: RedisEndpoint, wait: float) -> None:
        self._server = server
        self._wait = max(wait, CONNECT)
        self._most = server.settings.connections
        self._free = asyncio.Semaphore(self._most)
        self._idle: list[Client] = []
        self._tasks: set[asyncio.Task[Any]] = set()  # that connect or close

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Client]:
        async with self._free:
            client = self._idle.pop() if self._idle else await self._connected()
            whole = False
            try:
                yield client
                whole = True
            except ResponseError as error:
                whole = True
                if isinstance(error, ReadOnlyError) and self._server.settings.sentinels:
                    whole = False  # a master that has become a replica: the sentinels know the new one
                    self._server.doubt()
                raise
            finally:
                if whole:
                    self._keep(client)
                else:
                    self._task(close(client))

    async def aclose(self) -> None:
        """Closes idle connections, others after at most a command's time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait):
                for _ in range(self._most):
                    await self._free.acquire()
        if self._tasks:
            await asyncio.wait(self._tasks)
        while self._idle:
            self._task(close(self._idle.pop()))
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _connected(self) -> Client:
        task = self._task(self._server.client(self._wait))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done():  # in the same turn of the loop: `aclose` may come before any callback
                self._left_behind(task)
            else:
                task.add_done_callback(self._left_behind)
            raise

    def _left_behind(self, task: asyncio.Task[Client]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._keep(task.result())

    def _keep(self, client: Client) -> None:
        if len(self._idle) < self._most:
            self._idle.append(client)
        else:
            self._task(close(client))

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name="redis connection")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class RedisLink:
    """Has a breaker for reads and one for writes: a full Redis can still be read."""

    def __init__(self, server: RedisEndpoint, budget: float, name: str, counter: Counter) -> None:
        self._server = server
        self._clients = Clients(server, budget)
        self._budget = budget
        self._name = name
        self._counter = counter
        self._reads = Breaker(server.settings.breaker)
        self._writes = Breaker(server.settings.breaker)
        self._closed = False

    @property
    def states(self) -> dict[str, BreakerState]:
        return {f"{self._name}_reads": self._reads.state, f"{self._name}_writes": self._writes.state}

    def values(self, count: int, more: int = 0) -> ReplyBounds:
        """Bounds a reply with `count` values and `more` other elements. Two values may have the largest stored size;
        more than two add MEAN bytes each."""
        most = (MEAN * count if count > 2 else 0) + (self._server.settings.largest + HEADER) * min(count, 2)
        return ReplyBounds(1 + count + more, most + HEADER * (1 + count + more))

    async def read(
        self, command: Command, parse: Callable[[object], T], within: float | None = None, shape: ReplyBounds = SHORT
    ) -> T:
        """Raises StoreFault, also if the reply is larger than `shape` or `parse` refuses it."""
        return await self._run(self._reads, command, parse, within, shape)

    async def write(
        self, command: Command, parse: Callable[[object], T], within: float | None = None, shape: ReplyBounds = SHORT
    ) -> T:
        """Like `read`, under the breaker of writes."""
        return await self._run(self._writes, command, parse, within, shape)

    async def aclose(self) -> None:
        self._closed = True
        await self._clients.aclose()

    async def _run(
        self, breaker: Breaker, command: Command, parse: Callable[[object], T], within: float | None, shape: ReplyBounds
    ) -> T:
        budget = self._budget if within is None else min(within, self._budget)
        if self._closed or budget < STARVED:
            self._counter.count("cache_fault", "closed" if self._closed else "starved")
            raise NothingSentFault("closed" if self._closed else "no time left")
        if not breaker.allow():
            self._counter.count("cache_fault", "breaker")
            raise NothingSentFault("breaker open")
        try:
            async with asyncio.timeout(budget), self._clients.one() as client:
                client.expected.shape = shape
                answer = parse(await command(client.redis))
        except Exception as error:  # of any type: redis-py raises many on replies that it did not expect
            raise self._fault(breaker, error) from None
        breaker.succeeded()
        return answer

    def _fault(self, breaker: Breaker, error: Exception) -> StoreFault:
        word = type(error).__name__
        self._counter.count("cache_fault", word)
        self._server.refused(error)
        if of_another_type(error):
            breaker.succeeded()
        else:
            breaker.failed()
        return StoreFault(word)
