"""Admission slots: one for each generation that runs in the engine or waits for that, and for nothing else.

An answer out of a cache needs none, nor does a request that reads along with another one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType

from engine.api import Priority
from engine.errors import DeadlineExceeded
from service.config.settings import LimitOptions
from service.core.errors import Overloaded
from service.core.pace import Departures, retry_hint

DEADLINE = "DEADLINE"  # counted as a reason beside those of `Overloaded`
_MISSES = 64  # cache misses that a full queue allows at once
_MISSES_RATE = 128.0  # and per second; each takes the better part of a millisecond from those who are served


class AdmissionSlot:
    """One of them. Leaving the `with` block gives it back."""

    __slots__ = ("_owner", "priority", "started", "tokens")

    def __init__(self, owner: AdmissionSlots, priority: Priority, tokens: int) -> None:
        self._owner = owner
        self.priority = priority
        self.tokens = tokens  # of the prompt
        self.started = False

    def __enter__(self) -> AdmissionSlot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner.leave(self)

    def start(self) -> None:
        """The first token is there: it no longer waits."""
        if not self.started:
            self.started = True
            self._owner.started(self)


class AdmissionSlots:
    """As many as sequences that run at once, and as many more as may wait for that."""

    def __init__(
        self,
        limits: LimitOptions,
        capacity: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        refusals: Counter[str] | None = None,
    ) -> None:
        self._limits = limits
        self._capacity = capacity  # sequences that run at once
        self._clock = clock
        self._taken = 0
        self._waiting: Counter[Priority] = Counter()  # no first token yet
        self._waiting_tokens = 0
        self._departures = Departures()
        self._misses = 0.0  # recent cache misses while the queue was full
        self._misses_at = clock()
        self.refusals = Counter[str]() if refusals is None else refusals  # by reason; others count there as well

    @property
    def taken(self) -> int:
        """By those that run and those that wait."""
        return self._taken

    @property
    def waiting(self) -> int:
        """Those without a first token."""
        return self._waiting.total()

    @property
    def capacity(self) -> int:
        """Sequences that run at once."""
        return self._capacity()

    @property
    def total(self) -> int:
        """How many there are."""
        return self._capacity() + self._limits.queued_requests

    @property
    def full(self) -> bool:
        """Whether none is left."""
        return self._taken >= self.total

    @property
    def quiet(self) -> bool:
        """Whether there is room for work that nobody waits for: less than half of what may run does."""
        return self._taken < max(1, self._capacity() // 2)

    @property
    def many_misses(self) -> bool:
        """Whether the queue is full and so many lookups have missed that the next request is refused without one."""
        return self.full and self._recent_misses() >= _MISSES

    def check(self, priority: Priority, deadline: float | None, after_lookup: bool = False) -> None:
        """Raises DeadlineExceeded or Overloaded where `take` would now, whatever the prompt. `after_lookup`: the caches
        had no answer."""
        self._check_deadline(priority, deadline)
        if self.full:
            if after_lookup:
                self._misses = self._recent_misses() + 1
            raise self.overloaded("too many requests wait", "QUEUE_FULL", self._queue_time())

    def take(self, priority: Priority, tokens: int, deadline: float | None) -> AdmissionSlot:
        """Raises as `check`, and Overloaded where too many prompt tokens wait already. A prompt that waits alone is
        never too long."""
        self.check(priority, deadline, after_lookup=True)
        if self._waiting_tokens > 0 and self._waiting_tokens + tokens > self._limits.queued_prompt_tokens:
            raise self.overloaded("too many prompt tokens wait", "QUEUED_TOKENS", self._queue_time())
        self._taken += 1
        self._waiting[priority] += 1
        self._waiting_tokens += tokens
        self._departures.arrival(self._clock(), self._taken > self._capacity())
        return AdmissionSlot(self, priority, tokens)

    def started(self, slot: AdmissionSlot) -> None:
        """See AdmissionSlot.start."""
        self._waiting[slot.priority] -= 1
        self._waiting_tokens -= slot.tokens

    def leave(self, slot: AdmissionSlot) -> None:
        """Gives it back."""
        saturated = self._taken > self._capacity()
        slot.start()
        self._taken -= 1
        self._departures.departure(self._clock(), saturated)

    def overloaded(self, message: str, reason: str, queue_time: float) -> Overloaded:
        """The refusal, counted. Says when to come back."""
        self.refusals[reason] += 1
        return Overloaded(message, reason, retry_hint(queue_time))

    def late(self, message: str) -> DeadlineExceeded:
        """The refusal, counted."""
        self.refusals[DEADLINE] += 1
        return DeadlineExceeded(message)

    def _queue_time(self) -> float:
        """Seconds until all who wait now have gone."""
        return max(1, self._taken - self._capacity()) * self._departures.expected_interval(self._clock())

    def _recent_misses(self) -> float:
        now = self._clock()
        self._misses, self._misses_at = max(0.0, self._misses - (now - self._misses_at) * _MISSES_RATE), now
        return self._misses

    def _check_deadline(self, priority: Priority, deadline: float | None) -> None:
        if deadline is None:
            return
        queued = self._taken - self._capacity()
        ahead = min(queued, sum(count for other, count in self._waiting.items() if other >= priority))
        if ahead > 0 and deadline - self._clock() < ahead * self._departures.interval:
            raise self.late("the deadline cannot be met: the queue is too long")
