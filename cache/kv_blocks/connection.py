"""Holds one thread's connection to Redis: made when needed, dropped after any error, behind a breaker."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress

from cache.api import Address, RedisSettings
from cache.kv_blocks.resp import ForeignValueError, RespConnection, RespError
from cache.store.breaker import Breaker
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
from cache.store.redis_tls import TlsFiles

CONNECT = 1.0  # seconds that connecting may take, beyond the deadline of the fetch that began it
_SENTENCES = {"WRONGPASS": STRANGER, "NOAUTH": STRANGER, "NOPERM": FORBIDDEN}


def connect(settings: RedisSettings, deadline: float, tls: TlsFiles | None = None) -> RespConnection:
    """Raises OSError, RespError, and where nothing can be kept, UnfitError and NotMasterError."""
    where, sentinels = settings.where, settings.sentinel_servers
    context = (tls or TlsFiles(settings)).context()
    address = where.address if sentinels is None else _master(settings, sentinels.addresses, context, deadline)
    link = RespConnection(address, context, deadline)
    try:
        link.log_in(settings.login(), deadline)
        check_hello(_hello(link, deadline), sentinels is not None)
        if where.database:
            link.command(b"SELECT", b"%d" % where.database, deadline=deadline)
    except BaseException:
        link.close()
        raise
    return link


def _hello(link: RespConnection, deadline: float) -> object:
    try:
        return link.command(b"HELLO", b"2", deadline=deadline, shape=GREETING)
    except RespError as error:
        if str(error) == "ERR":
            raise UnfitError(OLD) from None
        raise


def _master(
    settings: RedisSettings, sentinels: Sequence[Address], tls: ssl.SSLContext | None, deadline: float
) -> Address:
    """The first sentinel that knows the master. Each has its share of the time, since some may be silent."""
    login, name = settings.sentinel_login(), settings.where.address.host.encode()
    for at, address in enumerate(sentinels):
        now = time.monotonic()
        until = now + (deadline - now) / (len(sentinels) - at + 1)  # the last share is the master's own
        with suppress(OSError, RespError), closing(RespConnection(address, tls, until)) as link:
            link.log_in(login, until)
            words = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", name)
            found = master_address(link.command(*words, deadline=until, shape=GREETING))
            if found is not None:
                return found
    raise NotMasterError


class BlockConnection:
    """Used by one thread at a time. Connecting may take longer than a fetch may wait: it continues in the
    background."""

    def __init__(self, settings: RedisSettings, breaker: Breaker, complaints: Complaints) -> None:
        self._settings = settings
        self._tls = TlsFiles(settings)
        self._breaker = breaker
        self._complaints = complaints
        self._connecting = ThreadPoolExecutor(1, "redis-connect")
        self._coming: Future[RespConnection] | None = None
        self._link: RespConnection | None = None

    @property
    def breaker(self) -> Breaker:
        return self._breaker

    @contextmanager
    def open(self, deadline: float) -> Iterator[RespConnection]:
        """An exception inside drops the connection. Raises OSError and RespError."""
        if not self._breaker.allow():
            raise RespError("breaker open")
        whole = False
        try:
            if self._link is None:
                self._link = self._connected(deadline)
            yield self._link
            whole = True
        except ForeignValueError:
            whole = True
            self._drop()  # what is left of the value would be read as the next answer
            raise
        except UnfitError as error:
            self._complaints.about(str(error))
            raise RespError(type(error).__name__) from None
        except NotMasterError as error:
            raise RespError(type(error).__name__) from None
        except RespError as error:
            if sentence := _SENTENCES.get(str(error)):
                self._complaints.about(sentence)
            raise
        finally:
            if whole:
                self._breaker.succeeded()
            else:
                self._breaker.failed()
                self._drop()

    def close(self) -> None:
        self._connecting.shutdown(wait=False, cancel_futures=True)
        if self._coming is not None:
            self._coming.add_done_callback(_close_unused)
        self._drop()

    def _connected(self, deadline: float) -> RespConnection:
        now = time.monotonic()
        if self._coming is None:
            self._coming = self._connecting.submit(connect, self._settings, max(deadline, now + CONNECT), self._tls)
        wait([self._coming], deadline - now)
        if not self._coming.done():
            raise TimeoutError("still connecting")
        coming, self._coming = self._coming, None
        return coming.result()

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def _close_unused(coming: Future[RespConnection]) -> None:
    if not coming.cancelled() and coming.exception() is None:
        coming.result().close()
