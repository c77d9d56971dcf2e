"""Writes to one call, and ends those whose reader takes nothing."""

from __future__ import annotations

import asyncio

from service.core.errors import StreamStalled
from service.observability.record import RecordBuilder
from service.transport.call.context import Context


class Writer:
    """Knows since when a write has been waiting."""

    def __init__(self, context: Context, watch: StallWatch, record: RecordBuilder) -> None:
        self.context = context
        self._record = record
        self._messages = 0
        self._bytes = 0
        self.waiting_since: float | None = None
        self.stalled = False
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()

    def __enter__(self) -> Writer:
        self._watch.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._watch.remove(self)
        self._record.messages_out, self._record.bytes_out = self._messages, self._bytes
        if self.stalled and kind is asyncio.CancelledError and self._task is not None:
            self._task.uncancel()
            raise StreamStalled("the reader took no message for too long")

    async def write(self, data: bytes) -> None:
        """Returns when gRPC has taken it."""
        self.waiting_since = self._loop.time()
        await self.context.write(data)
        self.waiting_since = None
        self._messages += 1
        self._bytes += len(data)

    def stall(self) -> None:
        """Interrupts the handler, which raises StreamStalled."""
        self.stalled = True
        if self._task is not None:
            self._task.cancel()


class StallWatch:
    """Ends streams whose reader takes nothing. One check of all costs less than a timer for each write."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout  # seconds
        self._writers: set[Writer] = set()

    def add(self, writer: Writer) -> None:
        self._writers.add(writer)

    def remove(self, writer: Writer) -> None:
        self._writers.discard(writer)

    async def run(self) -> None:
        """Ends a stream at most a tenth of the timeout late."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self._timeout / 10))
            before = loop.time() - self._timeout
            for writer in self._writers:
                since = writer.waiting_since
                if since is not None and since < before and not writer.stalled:
                    writer.stall()
