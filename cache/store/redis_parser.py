"""Replaces redis-py's reply parsers, which accept replies of any size, with one that bounds each reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis._parsers.base import AsyncBaseParser
from redis.exceptions import ConnectionError as ClosedError
from redis.exceptions import InvalidResponse

from cache.store.redis_replies import ErrorReply, ReplyBounds, ReplyProgress, ReplyReader, ReplyRefusedError

AT_ONCE = 256  # elements parsed before other tasks get the event loop


@dataclass(slots=True)
class Expected:
    shape: ReplyBounds


class BoundedParser(AsyncBaseParser):
    """Refuses a reply as soon as its header exceeds the bound; yields to the event loop every AT_ONCE elements."""

    def __init__(self, expected: Expected, socket_read_size: int) -> None:
        super().__init__(socket_read_size)
        self._expected = expected
        self._reader = ReplyReader()

    def on_connect(self, connection: Any) -> None:
        self._stream = connection._reader
        self._reader = ReplyReader()

    def on_disconnect(self) -> None:
        self._stream = None
        self._reader = ReplyReader()

    async def can_read(self) -> bool:
        """Whether unexpected bytes have arrived or the connection was closed: redis-py reconnects in both cases."""
        if self._stream is None:
            raise OSError("not connected")
        # As redis-py's own parsers do: StreamReader cannot be asked for what it holds.
        held: Any = self._stream
        return bool(self._reader.buffered or held._buffer) or held.at_eof()

    async def can_read_destructive(self) -> bool:
        return await self.can_read()

    async def read_response(self, disable_decoding: bool = False) -> Any:
        """Returns an error reply as an exception, as redis-py expects, if the connection is still usable. Raises
        InvalidResponse if the reply exceeds its bound or is malformed."""
        self._reader.begin(self._expected.shape)
        try:
            while (progress := self._reader.advance(AT_ONCE)) is not ReplyProgress.WHOLE:
                if progress is ReplyProgress.BUSY:
                    await asyncio.sleep(0)
                else:
                    self._reader.feed(await self._more())
        except ReplyRefusedError as error:
            raise InvalidResponse(str(error)) from None
        reply = self._reader.reply
        if isinstance(reply, ErrorReply):  # in a list it stays an ErrorReply, which fails the callers' type checks
            known: Callable[[str], Exception] = self.parse_error
            reply = known(reply.text)
        if isinstance(reply, ClosedError):
            raise reply
        return reply

    async def _more(self) -> bytes:
        if self._stream is None:
            raise ClosedError("not connected")
        data = await self._stream.read(self._read_size)
        if not data:
            raise ClosedError("connection closed")
        return data
