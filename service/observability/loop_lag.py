"""Measures how late the front's event loop is, which delays every stream, probe and signal."""

from __future__ import annotations

import asyncio
import time

from service.observability.histogram import Histogram

_INTERVAL = 0.1  # seconds
_BORDERS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class LoopLag:
    """uvloop's timers count whole milliseconds, so that the first bucket is noise."""

    def __init__(self) -> None:
        self.seconds = Histogram(_BORDERS)

    async def run(self) -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(_INTERVAL)
            self.seconds.add(max(0.0, time.monotonic() - begun - _INTERVAL))
