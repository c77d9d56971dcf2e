"""Waiting for what comes about by itself, and what a plain wait takes on this machine at the moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

PATIENCE = 60.0  # seconds


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    """Returns once the condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not await condition():
        assert time.monotonic() < deadline, "did not come about"
        await asyncio.sleep(0.005)


async def plain_wait(seconds: float) -> float:
    """What a wait that is cut after so many seconds takes here, with nothing else in it."""
    begun = time.perf_counter()
    try:
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().create_future()
    except TimeoutError:
        pass
    return time.perf_counter() - begun
