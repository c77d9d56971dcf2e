"""What redis-py's connections read replies with: its own parsers take whatever comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis._parsers.base import AsyncBaseParser
from redis.exceptions import ConnectionError as ClosedError
from redis.exceptions import InvalidResponse

from cache.store.redis_replies import ErrorReply, Progress, ReplyReader, ReplyRefusedError, Shape

AT_ONCE = 256  # elements taken apart between two turns of the event loop


@dataclass(slots=True)
class Expected:
    """What the command under way may answer, each of its replies for itself. Of one connection."""

    shape: Shape


class BoundedParser(AsyncBaseParser):
    """Refuses what was not asked for as soon as it is announced, and lets others have the event loop in between."""

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
        """Whether something came that nobody asked for, or the connection was closed."""
        if self._stream is None:
            raise OSError("not connected")
        # As redis-py's own parsers do: StreamReader cannot be asked for what it holds.
        held: Any = self._stream
        return bool(self._reader.buffered or held._buffer) or held.at_eof()

    async def can_read_destructive(self) -> bool:
        return await self.can_read()

    async def read_response(self, disable_decoding: bool = False) -> Any:
        """Raises InvalidResponse. Errors of Redis are returned where the connection is still good."""
        self._reader.begin(self._expected.shape)
        try:
            while (progress := self._reader.advance(AT_ONCE)) is not Progress.WHOLE:
                if progress is Progress.BUSY:
                    await asyncio.sleep(0)
                else:
                    self._reader.feed(await self._more())
        except ReplyRefusedError as error:
            raise InvalidResponse(str(error)) from None
        reply = self._reader.reply
        if isinstance(reply, ErrorReply):  # within a list nobody looks for them: they are of no type that is expected
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
