"""Counts and times of the caches, in memory, read by a metrics page. Thread-safe."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping

from cache.api import BORDERS, Times


class Counters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}
        self._buckets: dict[str, list[int]] = {}
        self._totals: dict[str, float] = {}

    def count(self, event: str, label: str = "", amount: int = 1) -> None:
        with self._lock:
            self._counts[event, label] = self._counts.get((event, label), 0) + amount

    def observe(self, event: str, seconds: float) -> None:
        with self._lock:
            buckets = self._buckets.setdefault(event, [0] * (len(BORDERS) + 1))
            buckets[bisect_left(BORDERS, seconds)] += 1
            self._totals[event] = self._totals.get(event, 0.0) + seconds

    def counts(self) -> Mapping[tuple[str, str], int]:
        with self._lock:
            return dict(self._counts)

    def times(self) -> Mapping[str, Times]:
        with self._lock:
            return {event: Times(tuple(row), self._totals[event]) for event, row in self._buckets.items()}
