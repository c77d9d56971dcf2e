"""How fast requests leave, and from it, when a caller who is refused should come back."""

from __future__ import annotations

import random

_SHORTEST_HINT = 0.1  # seconds
_LONGEST_HINT = 60.0  # seconds; what is further away than that cannot be foretold
_STEPS = ((1.0, 100), (10.0, 20), (_LONGEST_HINT, 4))  # a second, of hints no longer than that: 471 different ones
_SMOOTHING = 0.1  # weight of the newest measurement
_STAYS_AHEAD = 10.0  # that those who were refused before are let pass
_ENOUGH_DEPARTURES = 8  # before that many, nothing is predicted


class Departures:
    """How often a slot becomes free while others wait for one."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._count = 0
        self._last: float | None = None
        self._waited_since: float | None = None  # for the next departure; None: nobody waits

    @property
    def interval(self) -> float:
        """Seconds between two of them; 0 while too few were seen."""
        return self._mean if self._count >= _ENOUGH_DEPARTURES else 0.0

    def expected_interval(self, now: float, stay: float, capacity: int) -> float:
        """The same as a guess: with too few seen, from how long one is held. All slots may have been taken at
        once: while nobody leaves, a stay is taken to be as long as that has lasted."""
        waited = 0.0 if self._waited_since is None else now - self._waited_since
        return max(self.interval or stay / capacity, waited / capacity)

    def arrival(self, now: float, saturated: bool) -> None:
        """One more, who waits or not."""
        if saturated and self._waited_since is None:
            self._waited_since = now

    def departure(self, now: float, saturated: bool) -> None:
        """One left. Only intervals during which somebody waited say anything."""
        if saturated and self._last is not None:
            self._mean = smoothed(self._mean, now - self._last, first=self._count == 0)
            self._count += 1
        self._last = self._waited_since = now if saturated else None


class RequestDuration:
    """How long requests are live."""

    def __init__(self, presumed: float = 0.0) -> None:
        self.mean = presumed  # seconds; what it is taken to be until one was seen
        self._seen = False

    def ended(self, seconds: float) -> None:
        self.mean = smoothed(self.mean, seconds, first=not self._seen)
        self._seen = True


class Returns:
    """When those who were refused are to be back: one after another, as the queue has room. Told the same
    time, they would meet again, and all but one be refused again."""

    def __init__(self) -> None:
        self._last = 0.0  # of those told so far, on the caller's clock

    def next(self, now: float, queue_time: float, interval: float, stay: float) -> float:
        """Seconds until the next one is to come. Not everybody does, so nobody is told to wait for ten stays more."""
        latest = queue_time + _STAYS_AHEAD * stay
        self._last = max(self._last, now + queue_time - interval) + interval
        self._last = min(self._last, now + latest)
        return self._last - now


def retry_hint(queue_time: float) -> float:
    """Seconds, for a caller who finds a queue that takes `queue_time` to pass: some time in its second half, so that
    those who are refused do not return at once, and the queue is not empty before they do. In steps of some per cent:
    there are few different ones, and what is made of them can be kept."""
    hint = min(_LONGEST_HINT, max(2 * _SHORTEST_HINT, queue_time)) * random.uniform(0.5, 1.0)
    steps = next(steps for shorter_than, steps in _STEPS if hint <= shorter_than)
    return round(hint * steps) / steps


def smoothed(mean: float, newest: float, first: bool) -> float:
    """The mean of many, the newest of which weighs a tenth."""
    return newest if first else mean + _SMOOTHING * (newest - mean)
