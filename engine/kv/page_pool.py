"""Owns which key-value pages are free and how many hold each of the others."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


class PagePool:
    """Hands out neighbours where it can, since what is contiguous is read without a gather."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one page, not {total}")
        self.total = total
        self.free = 0
        self._holders = [0] * total
        self._end_of: dict[int, int] = {}  # free run: start → end, exclusive
        self._start_of: dict[int, int] = {}  # free run: end → start
        self._by_size: list[tuple[int, int]] = []  # free runs as (length, start), ascending
        self._add_run(0, total)

    @property
    def used(self) -> int:
        return self.total - self.free

    def holders(self, page: int) -> int:
        return self._holders[page]

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Takes `count` pages or none, right behind page `after` where those are free."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > self.free:
            return None
        pages: list[int] = []
        if count and after is not None and after + 1 in self._end_of:
            pages += self._carve(after + 1, after + 1, count)
        while len(pages) < count:
            pages += self._from_largest(count - len(pages))
        for page in pages:
            self._holders[page] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        if any(not self._held(page) for page in pages):
            raise ValueError("a free page cannot be shared")
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Removes a holder from each; a page without one is free."""
        if len(set(pages)) != len(pages) or any(not self._held(page) for page in pages):
            raise ValueError("a page was released twice")
        freed = []
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                freed.append(page)
        freed.sort()
        start = 0
        for index in range(1, len(freed) + 1):
            if index == len(freed) or freed[index] != freed[index - 1] + 1:
                self._add_run(freed[start], freed[index - 1] + 1)
                start = index

    def _held(self, page: int) -> bool:
        return 0 <= page < self.total and self._holders[page] > 0

    def _from_largest(self, count: int) -> list[int]:
        """Leaves half of the rest of the largest free run for the sequence that grows towards it."""
        length, start = self._by_size[-1]
        count = min(count, length)
        first = start if start == 0 else start + (length - count) // 2
        return self._carve(start, first, count)

    def _carve(self, start: int, first: int, count: int) -> list[int]:
        end = self._end_of[start]
        last = min(first + count, end)
        self._drop_run(start, end)
        if start < first:
            self._add_run(start, first)
        if last < end:
            self._add_run(last, end)
        return list(range(first, last))

    def _add_run(self, start: int, end: int) -> None:
        below, above = self._start_of.get(start), self._end_of.get(end)
        if below is not None:
            self._drop_run(below, start)
            start = below
        if above is not None:
            self._drop_run(end, above)
            end = above
        self._end_of[start] = end
        self._start_of[end] = start
        insort(self._by_size, (end - start, start))
        self.free += end - start

    def _drop_run(self, start: int, end: int) -> None:
        self.free -= end - start
        del self._end_of[start], self._start_of[end]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
