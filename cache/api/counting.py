"""Counts and durations: how caches report them, and how a metrics page reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# seconds; upper borders of the buckets of a histogram, the last bucket is open
BORDERS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Times:
    buckets: tuple[int, ...]  # one more than BORDERS
    total: float  # seconds


class Counter(Protocol):
    """Labels are names of rules and states, never a caller's text."""

    def count(self, event: str, label: str = "", amount: int = 1) -> None: ...

    def observe(self, event: str, seconds: float) -> None: ...
