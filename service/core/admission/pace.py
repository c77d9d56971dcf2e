"""Measures how fast requests leave, and derives when a refused caller should retry."""

from __future__ import annotations

import random

_SHORTEST_HINT = 0.1  # seconds
_LONGEST_HINT = 60.0  # seconds; what is further away than that cannot be predicted
_SMOOTHING = 0.1  # weight of the newest measurement
_STAYS_AHEAD = 10.0  # that those who were refused before are let pass
_ENOUGH_DEPARTURES = 8  # before that many, nothing is predicted


class Departures:
    """How often a slot becomes free while requests wait for one."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._count = 0
        self._last: float | None = None
        self._waited_since: float | None = None  # for the next departure; None: no request waits

    @property
    def interval(self) -> float:
        """Seconds; 0 while too few departures were measured."""
        return self._mean if self._count >= _ENOUGH_DEPARTURES else 0.0

    def expected_interval(self, now: float, stay: float, capacity: int) -> float:
        """Guesses from how long slots are held while too few departures were measured. While no request leaves, a stay
        is assumed to last as long as that has."""
        waited = 0.0 if self._waited_since is None else now - self._waited_since
        return max(self.interval or stay / capacity, waited / capacity)

    def arrival(self, now: float, saturated: bool) -> None:
        if saturated and self._waited_since is None:
            self._waited_since = now

    def departure(self, now: float, saturated: bool) -> None:
        """Measures only intervals during which a request waited."""
        if saturated and self._last is not None:
            self._mean = smoothed(self._mean, now - self._last, first=self._count == 0)
            self._count += 1
        self._last = self._waited_since = now if saturated else None


class RequestDuration:
    def __init__(self, presumed: float = 0.0) -> None:
        self.mean = presumed  # seconds; what it is taken to be until one was seen
        self._seen = False

    def ended(self, seconds: float) -> None:
        self.mean = smoothed(self.mean, seconds, first=not self._seen)
        self._seen = True


class Returns:
    """Spreads retry times over the room that the queue will have, since callers that return together are refused
    together."""

    def __init__(self) -> None:
        self._last = 0.0  # of the latest hint, on the caller's clock

    def next(self, now: float, queue_time: float, interval: float, stay: float) -> float:
        """Seconds, at most ten stays beyond `queue_time`, since not every caller retries."""
        latest = queue_time + _STAYS_AHEAD * stay
        self._last = max(self._last, now + queue_time - interval) + interval
        self._last = min(self._last, now + latest)
        return self._last - now


def retry_hint(queue_time: float) -> float:
    """Seconds in the second half of `queue_time`, so that callers neither return at once nor find the queue empty."""
    return min(_LONGEST_HINT, max(2 * _SHORTEST_HINT, queue_time)) * random.uniform(0.5, 1.0)


def smoothed(mean: float, newest: float, first: bool) -> float:
    """The newest value weighs a tenth."""
    return newest if first else mean + _SMOOTHING * (newest - mean)
