"""Schedules Python's cycle collection: when no call waits, and otherwise rarely. By default it takes 10 to 70 ms
several times a second with hundreds of live streams (docs/measurements/front.md). New objects are collected more often:
gRPC's three objects of each call in a flood would otherwise take 32 MiB, which Python never gives back."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

from service.transport.process.heap import resident

_EVERY = 0.25  # seconds between two looks whether it is time
_LONGEST = 600.0  # seconds without one, however many wait
_GROWN = 32 * 1024 * 1024  # bytes that the process has more than after the last one
_SOME = 1_000  # objects more than after the last one, where no call waits
_MANY = 10_000  # the same, where a call waits: of 3,000 calls, 4 MB, and a millisecond


class Garbage:
    def __init__(self) -> None:
        """Excludes all existing objects from collection."""
        gc.collect()
        gc.freeze()
        gc.disable()
        self._least = resident()

    async def run(self, live: Callable[[], int]) -> None:
        """`live`: how many calls wait for this process."""
        clock = asyncio.get_running_loop().time
        since = clock()
        while True:
            await asyncio.sleep(_EVERY)
            if clock() - since > _LONGEST or resident() > self._least + _GROWN:
                gc.collect()
                since, self._least = clock(), resident()
            elif gc.get_count()[0] > (_MANY if live() else _SOME):
                gc.collect(0)  # what was made since the last one: a call may come meanwhile
