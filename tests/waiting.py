"""Waits for what another thread, process or task does, and finds out whether a process has ended."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 120.0  # seconds after which a test that waits has failed, on however slow a machine


def wait_for(condition: Callable[[], object]) -> None:
    """Returns once the condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


async def until(condition: Callable[[], object]) -> float:
    """Returns once the condition holds, and how many seconds that took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < PATIENCE, "waited in vain"
        await asyncio.sleep(0.005)
    return time.monotonic() - begun


def gone(*pids: int) -> bool:
    """Whether all these processes have ended; one that only waits to be reaped has."""
    return all(map(_gone, pids))


def reaped(pid: int) -> bool:
    """Whether the process has ended, and its parent knows."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
