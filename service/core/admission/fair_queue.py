"""Orders generations without a first token, and chooses which one is evicted.

The engine orders by rank (arrival, advanced by priority) and knows no tenants. Here a tenant's second request is
advanced before the third of every other, its third before the fourth, and so on, but never before a higher priority.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from engine.api import AGING, Priority
from service.core.errors import Overloaded

_JUST = 1e-6  # seconds; less than lies between two arrivals


@dataclass(slots=True, eq=False)
class Waiting:
    tenant: str
    priority: Priority
    tokens: int  # of the prompt
    rank: float = 0.0  # seconds; the lower goes first
    forward: float = 0.0  # seconds; put forward by so much beyond its priority
    evict: Callable[[Overloaded], None] | None = None  # ends it for another tenant's sake; None: it cannot be


@dataclass(slots=True)
class _Line:
    waiting: list[Waiting] = field(default_factory=list)  # by rank
    tokens: int = 0
    counts: defaultdict[Priority, int] = field(default_factory=lambda: defaultdict(int))

    def above(self, priority: Priority) -> int:
        return sum(count for other, count in self.counts.items() if other >= priority)


class FairQueue:
    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._count = 0
        self.tokens = 0  # of their prompts

    def __len__(self) -> int:
        return self._count

    def add(self, one: Waiting, arrived_at: float) -> None:
        natural = arrived_at - AGING * one.priority
        line = self._lines.get(one.tenant)
        if line is None:
            line = self._lines[one.tenant] = _Line()
        own = bisect_right(line.waiting, natural, key=_rank)  # of its tenant, that go before it
        one.rank = natural
        if len(self._lines) > 1:
            others = (self._turn(other, own, one.priority) for other in self._lines.values() if other is not line)
            one.rank = min(natural, *others)
        if own:
            one.rank = max(one.rank, line.waiting[own - 1].rank)
        one.forward = natural - one.rank
        insort(line.waiting, one, key=_rank)
        line.tokens += one.tokens
        line.counts[one.priority] += 1
        self._count += 1
        self.tokens += one.tokens

    def remove(self, one: Waiting) -> None:
        line = self._lines[one.tenant]
        line.waiting.remove(one)
        line.tokens -= one.tokens
        line.counts[one.priority] -= 1
        self._count -= 1
        self.tokens -= one.tokens
        if not line.waiting:
            del self._lines[one.tenant]

    def ahead(self, tenant: str, priority: Priority) -> int:
        """Returns how many would be served before a new request."""
        line = self._lines.get(tenant)
        own = 0 if line is None else line.above(priority)
        others = (min(own + 1, other.above(priority)) for other in self._lines.values() if other is not line)
        return own + sum(others)

    def longest(self, tenant: str, priority: Priority) -> Waiting | None:
        """Returns the newest, lowest-priority generation of the tenant with most waiting, if `tenant` may evict it;
        else the newest of its own background generations, if any."""
        mine = self._lines.get(tenant)
        most = max(self._lines.values(), key=lambda line: len(line.waiting), default=None)
        if most is None:
            return None
        if len(most.waiting) > (0 if mine is None else len(mine.waiting)) + 1:
            return next(iter(self._able(most, priority)), None)
        if priority == Priority.BACKGROUND or mine is None or not mine.counts[Priority.BACKGROUND]:
            return None
        return next(iter(self._able(mine, Priority.BACKGROUND)), None)

    def heaviest(self, tenant: str, priority: Priority, tokens: int, room: int) -> list[Waiting]:
        """Chooses evictions, newest first, of the tenant with most waiting prompt tokens, so that at most `room` remain
        with the new `tokens`. Empty: impossible."""
        mine = self._lines.get(tenant)
        most = max(self._lines.values(), key=lambda line: line.tokens, default=None)
        if most is None or most is mine:
            return []
        gone: list[Waiting] = []
        freed, fair = 0, tokens + (0 if mine is None else mine.tokens)
        for one in self._able(most, priority):
            if self.tokens - freed + tokens <= room:
                return gone
            if most.tokens - freed <= fair:
                break
            gone.append(one)
            freed += one.tokens
        return gone if self.tokens - freed + tokens <= room else []

    @staticmethod
    def _turn(other: _Line, own: int, priority: Priority) -> float:
        """The rank just before the other tenant's request number `own` + 2."""
        later = (one.rank for one in islice(other.waiting, own + 1, None) if one.priority <= priority)
        return next(later, float("inf")) - _JUST

    @staticmethod
    def _able(line: _Line, priority: Priority) -> list[Waiting]:
        """Generations that this priority may evict: lowest priority first, then newest."""
        able = [one for one in reversed(line.waiting) if one.evict is not None and one.priority <= priority]
        return sorted(able, key=lambda one: one.priority)


def _rank(one: Waiting) -> float:
    return one.rank
