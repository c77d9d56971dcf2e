"""When Python looks for garbage that refers to itself: when nobody waits, and otherwise rarely.

A call needs some hundred objects, which go with it by themselves but for three or four of gRPC's. Left alone, Python
looks whenever there are some hundred objects more than before, and then at everything that was made since the last
time, which is nearly all that hundreds of live streams have: 10 to 70 ms, several times a second, in which nobody is
answered (docs/measurements/front.md). What was made since the last look is looked at more often: in a flood beside one
live stream, gRPC's own three objects of each call would otherwise take 32 MiB, which Python never gives back.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

from service.transport.process.heap import resident

_EVERY = 0.25  # seconds between two looks whether it is time
_LONGEST = 600.0  # seconds without one, however many wait
_GROWN = 32 * 1024 * 1024  # bytes that the process has more than after the last one
_SOME = 1_000  # objects more than after the last one, where nobody waits
_MANY = 10_000  # the same, where somebody waits: of 3,000 calls, 4 MB, and a millisecond


class Garbage:
    """This process's."""

    def __init__(self) -> None:
        """Nothing of what is there now is ever looked at."""
        gc.collect()
        gc.freeze()
        gc.disable()
        self._least = resident()

    async def run(self, live: Callable[[], int]) -> None:
        """For ever. `live`: how many wait for this process."""
        clock = asyncio.get_running_loop().time
        since = clock()
        while True:
            await asyncio.sleep(_EVERY)
            if clock() - since > _LONGEST or resident() > self._least + _GROWN:
                gc.collect()
                since, self._least = clock(), resident()
            elif gc.get_count()[0] > (_MANY if live() else _SOME):
                gc.collect(0)  # what was made since the last one: somebody may come meanwhile
