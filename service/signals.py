"""Turns SIGTERM and SIGINT into an event that work is raced against."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable
from types import FrameType


class Signals:
    """Ignores further signals once the server has ended, even while the interpreter shuts down."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._came = asyncio.Event()
        self._before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGINT)}

    def __enter__(self) -> Signals:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if kind is None else handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._came.set)

    async def before(self, work: Awaitable[object]) -> bool:
        """Returns whether `work` was done before a signal."""
        task = asyncio.ensure_future(work)
        signalled = asyncio.ensure_future(self._came.wait())
        try:
            await asyncio.wait((task, signalled), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
                return True
            self._came.clear()
            return False
        finally:
            for other in (task, signalled):
                other.cancel()
            await asyncio.gather(task, signalled, return_exceptions=True)
