"""Decides when to stop sending commands to a failing store, and when to try again. No I/O; thread-safe."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from cache.api import BreakerSettings, BreakerState


class Breaker:
    def __init__(self, settings: BreakerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: deque[float] = deque(maxlen=settings.failures)
        self._state = BreakerState.CLOSED
        self._since = 0.0  # when it opened, or when the probe began

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def waiting(self) -> bool:
        """Does not become the probe, unlike `allow`."""
        with self._lock:
            closed = self._state is BreakerState.CLOSED
            return not closed and self._clock() - self._since < self._settings.cooldown

    def allow(self) -> bool:
        """True in state PROBING makes the caller the probe: it must report."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return True
            # A probe that never reported (its task was killed) must not keep the breaker open for ever.
            if self._clock() - self._since < self._settings.cooldown:
                return False
            self._state, self._since = BreakerState.PROBING, self._clock()
            return True

    def succeeded(self) -> None:
        with self._lock:
            if self._state is BreakerState.OPEN:
                return  # a straggler from before it opened proves nothing
            self._state = BreakerState.CLOSED
            self._failures.clear()

    def failed(self) -> None:
        with self._lock:
            now = self._clock()
            if self._state is BreakerState.PROBING:
                self._state, self._since = BreakerState.OPEN, now
                return
            self._failures.append(now)
            if self._state is BreakerState.CLOSED and self._full(now):
                self._state, self._since = BreakerState.OPEN, now
                self._failures.clear()

    def _full(self, now: float) -> bool:
        return len(self._failures) == self._settings.failures and now - self._failures[0] <= self._settings.window
