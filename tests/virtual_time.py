"""An event loop whose clock moves only while every task waits: sleeps take no time, and load reorders nothing.

For tests marked `virtual_time`, which use no sockets, threads or processes: those need the real clock.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from typing import Any

import pytest

_STILL = 3600.0  # seconds of virtual time that a test may last


class _Selector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Moves the loop's clock where the loop would block."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready: list[Any] = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("every task of this test waits, and none for a time")
        self.now += max(timeout, 1e-6)
        assert self.now < _STILL, "this test waits without end"
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    virtual = item.get_closest_marker("virtual_time") is not None
    return {"virtual": VirtualTimeLoop} if virtual else {"real": asyncio.new_event_loop}
