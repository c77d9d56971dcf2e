"""Keeps (rank, key) pairs in order. A change searches in log n and shifts an array of pointers: a few microseconds for
tens of thousands, and no dead entries, unlike a heap."""

from __future__ import annotations

from bisect import bisect_left, insort


class Ordered:
    def __init__(self) -> None:
        self._pairs: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._pairs)

    def first(self) -> tuple[float, int] | None:
        return self._pairs[0] if self._pairs else None

    def add(self, rank: float, key: int) -> None:
        insort(self._pairs, (rank, key))

    def discard(self, rank: float, key: int) -> None:
        index = bisect_left(self._pairs, (rank, key))
        if index < len(self._pairs) and self._pairs[index] == (rank, key):
            del self._pairs[index]
