"""One thread's connection to Redis: made when needed, dropped after any error, behind a breaker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cache.api import RedisSettings
from cache.kv_blocks.resp import ForeignValueError, RespConnection, RespError
from cache.store.breaker import Breaker


class BlockConnection:
    """Used by one thread at a time."""

    def __init__(self, settings: RedisSettings, breaker: Breaker) -> None:
        self._settings = settings
        self._breaker = breaker
        self._link: RespConnection | None = None

    @property
    def breaker(self) -> Breaker:
        """For its state: `open` reports successes and failures."""
        return self._breaker

    @contextmanager
    def open(self, deadline: float) -> Iterator[RespConnection]:
        """The connection, made now if need be. An exception inside drops it. Raises OSError and RespError."""
        if not self._breaker.allow():
            raise RespError("breaker open")
        whole = False
        try:
            if self._link is None:
                self._link = RespConnection(self._settings, deadline)
            yield self._link
            whole = True
        except ForeignValueError:
            whole = True
            self.close()  # what is left of the value would be read as the next answer
            raise
        finally:
            if whole:
                self._breaker.succeeded()
            else:
                self._breaker.failed()
                self.close()

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
