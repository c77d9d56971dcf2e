"""Counts of measured values by size, cheap enough for the path of every message."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate


class Histogram:
    """As in Prometheus, a value falls into the first bucket whose border is not below it."""

    __slots__ = ("borders", "counts", "total")

    def __init__(self, borders: tuple[float, ...]) -> None:
        self.borders = borders  # ascending; above the last one there is one bucket more
        self.counts = [0] * (len(borders) + 1)
        self.total = 0.0  # sum of all values

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.borders, value)] += times
        self.total += value * times

    def cumulative(self) -> Iterator[tuple[str, float]]:
        """Yields each upper border and how many values do not exceed it."""
        return zip((*map(str, self.borders), "+Inf"), accumulate(self.counts), strict=True)


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """Adds at least one histogram of equal borders."""
    first, *others = histograms
    found = Histogram(first.borders)
    for one in (first, *others):
        found.counts = [a + b for a, b in zip(found.counts, one.counts, strict=True)]
        found.total += one.total
    return found
