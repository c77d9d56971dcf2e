"""Opens connections to Redis: to a server, or to the master that sentinels name. With `redis_link` the only module that
depends on how redis-py behaves, whose defaults wait 3.5 s for a refused port and over 30 s for a stalled server. Here
nothing is retried."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from redis.asyncio import ConnectionPool, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from cache.api import Address, Login, RedisSettings
from cache.store.redis_hello import (
    FORBIDDEN,
    GREETING,
    OLD,
    STRANGER,
    Complaints,
    NotMasterError,
    UnfitError,
    check_hello,
    master_address,
)
from cache.store.redis_parser import BoundedParser, Expected
from cache.store.redis_tls import TlsFiles

READ_SIZE = 1 << 18  # bytes per read; bounds the unparsed bytes that a connection holds beyond the expected reply


@dataclass(frozen=True, slots=True)
class Client:
    redis: Redis
    expected: Expected


class _TlsConnection(SSLConnection):
    """Uses an existing context. redis-py would make one for each connection, on the event loop, and trust the system's
    authorities as well."""

    def __init__(self, context: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**options)
        self.ssl_context.context = context


def client_of(address: Address, login: Login, database: int, tls: ssl.SSLContext | None, wait: float) -> Client:
    """Not connected yet; waits `wait` seconds at most on its socket, and leaves replies unconverted."""
    expected = Expected(GREETING)
    options: dict[str, Any] = {
        "host": address.host,
        "port": address.port,
        "db": database,
        "username": login.user or None,
        "password": login.password or None,
        "socket_timeout": wait,
        "socket_connect_timeout": wait,
        "socket_read_size": READ_SIZE,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
        "protocol": 2,
        "driver_info": None,
        "parser_class": partial(BoundedParser, expected),
    }
    if tls is not None:
        options |= {"connection_class": _TlsConnection, "context": tls}
    client = Redis.from_pool(ConnectionPool(max_connections=1, **options))
    client.response_callbacks.clear()  # they take every reply for what it should be
    return Client(client, expected)


async def close(client: Client) -> None:
    with suppress(RedisError, OSError):
        await client.redis.aclose(close_connection_pool=True)


class RedisEndpoint:
    """Asks sentinels for the master when it is not known, or could not be used."""

    def __init__(self, settings: RedisSettings) -> None:
        self.settings = settings
        self._tls = TlsFiles(settings)
        self._complaints = Complaints()
        self._master: Address | None = None if settings.sentinels else settings.where.address
        self._finding: asyncio.Task[Address] | None = None  # for all who wait for it
        self._asking: set[asyncio.Task[Address | None]] = set()

    async def client(self, wait: float) -> Client:
        """Each step takes at most `wait` seconds. Raises what redis-py raises, OSError, UnfitError and
        NotMasterError."""
        settings = self.settings
        try:
            address = self._master or await self._found(wait)
            client = client_of(address, settings.login(), settings.where.database, self._tls.context(), wait)
            try:
                check_hello(await _hello(client.redis), settings.sentinels is not None)
            except BaseException:
                self.doubt()
                await close(client)
                raise
        except Exception as error:
            self.refused(error)
            raise
        return client

    def doubt(self) -> None:
        if self.settings.sentinels:
            self._master = None

    def refused(self, error: Exception) -> None:
        match error:
            case UnfitError():
                self._complaints.about(str(error))
            case AuthenticationError() | AuthenticationWrongNumberOfArgsError():
                self._complaints.about(STRANGER)
            case NoPermissionError():
                self._complaints.about(FORBIDDEN)

    async def aclose(self) -> None:
        if self._asking:
            await asyncio.wait(self._asking)

    async def _found(self, wait: float) -> Address:
        if self._finding is None or self._finding.done():
            self._finding = asyncio.get_running_loop().create_task(self._find(wait), name="redis master")
        return await asyncio.shield(self._finding)

    async def _find(self, wait: float) -> Address:
        """Asks all sentinels at once, since some may be gone or silent. None is cancelled, since a connection that is
        being made would be left open."""
        login, sentinels = self.settings.sentinel_login(), self.settings.sentinel_servers
        asked = [] if sentinels is None else [self._ask(one, login, wait) for one in sentinels.addresses]
        tasks = [asyncio.get_running_loop().create_task(one, name="redis sentinel") for one in asked]
        self._asking.update(tasks)
        for task in tasks:
            task.add_done_callback(self._asking.discard)
        for answer in asyncio.as_completed(tasks):
            if (found := await answer) is not None:
                self._master = found
                return found
        raise NotMasterError

    async def _ask(self, sentinel: Address, login: Login, wait: float) -> Address | None:
        name, client = self.settings.where.address.host, client_of(sentinel, login, 0, self._tls.context(), wait)
        try:
            return master_address(await _asked(client.redis, "SENTINEL GET-MASTER-ADDR-BY-NAME", name))
        except (RedisError, OSError) as error:
            self.refused(error)
            return None
        finally:
            await close(client)


async def _hello(client: Redis) -> object:
    try:
        return await _asked(client, "HELLO", 2)
    except ResponseError as error:
        if type(error) is ResponseError:  # none of those that have a word of their own
            raise UnfitError(OLD) from None
        raise


async def _asked(client: Redis, *words: str | int) -> object:
    untyped: Any = client
    return await cast("Awaitable[object]", untyped.execute_command(*words))
