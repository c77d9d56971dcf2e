"""Grants admission slots: one for each generation that runs or waits in the engine."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType

from engine.api import Priority
from engine.errors import DeadlineExceeded
from service.config.settings import LimitOptions
from service.core.admission.fair_queue import FairQueue, Waiting
from service.core.admission.pace import Departures, RequestDuration, Returns, retry_hint
from service.core.errors import Overloaded, Reason

DEADLINE = "DEADLINE"  # counted as a reason beside those of `Overloaded`
_STAY = 1.0  # seconds that a generation is taken to last until one was seen
_MISSES = 64  # cache misses that a full queue allows at once
_MISSES_RATE = 128.0  # and per second; each takes the better part of a millisecond from those who are served
_READ = 64  # requests that are read at once only to be refused
_READ_RATE = 128.0  # and per second; of more than those the front would do nothing else


class _Recent:
    """Counts events, of which `rate` a second are forgotten."""

    __slots__ = ("_at", "_clock", "_count", "_rate")

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._count = 0.0
        self._at = clock()

    def add(self) -> None:
        self._count = self.count + 1

    @property
    def count(self) -> float:
        now = self._clock()
        self._count, self._at = max(0.0, self._count - (now - self._at) * self._rate), now
        return self._count


class AdmissionSlot:
    __slots__ = ("_owner", "_waiting", "given_back", "unqueued_since")

    def __init__(self, owner: AdmissionSlots, waiting: Waiting, unqueued_since: float | None) -> None:
        self._owner = owner
        self.unqueued_since = unqueued_since  # when it began, where it had not to wait
        self._waiting: Waiting | None = waiting  # None: it has its first token
        self.given_back = False

    @property
    def forward(self) -> float:
        """Seconds by which the engine's queue treats the request as older."""
        return 0.0 if self._waiting is None else self._waiting.forward

    def on_evict(self, evict: Callable[[Overloaded], None]) -> None:
        """Calls `evict` at most once, the slot already given back, where the waiting request makes room for another
        tenant."""
        if self._waiting is not None:
            self._waiting.evict = evict

    def __enter__(self) -> AdmissionSlot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.given_back:
            self.given_back = True
            self._owner.leave(self)

    def start(self) -> None:
        """Marks the first token."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._owner.started(waiting)


class AdmissionSlots:
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
        self._queue = FairQueue()
        self._departures = Departures()
        self._stay = RequestDuration(presumed=_STAY)  # of those that did not wait: afterwards departures tell more
        self._returns = Returns()
        self._misses = _Recent(_MISSES_RATE, clock)  # of the caches, while the queue was full
        self._read = _Recent(_READ_RATE, clock)  # requests that were read and found the queue full
        self.refusals = Counter[str]() if refusals is None else refusals  # by reason; others count there as well

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def waiting(self) -> int:
        """Generations without a first token."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Generations with a first token."""
        return self._taken - len(self._queue)

    @property
    def capacity(self) -> int:
        return self._capacity()

    @property
    def total(self) -> int:
        return self._capacity() + self._limits.queued_requests

    @property
    def full(self) -> bool:
        return self._taken >= self.total

    @property
    def quiet(self) -> bool:
        """Work without a waiting caller has room."""
        return self._taken < max(1, self._capacity() // 2)

    @property
    def many_misses(self) -> bool:
        """The queue is full, and lookups missed so often lately that the next request gets none."""
        return self.full and self._misses.count >= _MISSES

    @property
    def stormed(self) -> bool:
        """Far more requests arrive than can be admitted."""
        return self._read.count >= _READ / 2

    def check_unread(self, tenant: str) -> None:
        """Raises Overloaded where any request of the tenant would be refused."""
        if self.full and self._read.count >= _READ and self._queue.longest(tenant, Priority.INTERACTIVE) is None:
            raise self._queue_full()

    def check(self, priority: Priority, deadline: float | None, tenant: str = "", after_lookup: bool = False) -> None:
        """Raises DeadlineExceeded or Overloaded where `take` would now for any prompt."""
        self._check_deadline(priority, deadline, tenant)
        if self.full and self._queue.longest(tenant, priority) is None:
            self._read.add()
            if after_lookup:
                self._misses.add()
            raise self._queue_full()

    def take(
        self,
        priority: Priority,
        tokens: int,
        deadline: float | None,
        tenant: str = "",
        arrived_at: float | None = None,  # None: now
    ) -> AdmissionSlot:
        """Raises as `check`, and where too many prompt tokens wait; a prompt that waits alone is never too long. In a
        full queue, the tenant with most waiting gives way to one with less."""
        self.check(priority, deadline, tenant, after_lookup=True)
        room = self._limits.queued_prompt_tokens
        if tokens and self._queue.tokens > 0 and self._queue.tokens + tokens > room:
            heavy = self._queue.heaviest(tenant, priority, tokens, room)
            if not heavy:
                raise self._too_many_tokens()
            for one in heavy:
                _evict(one, self._too_many_tokens())
        if self.full and (last := self._queue.longest(tenant, priority)) is not None:
            _evict(last, self._queue_full())
        now = self._clock()
        waiting = Waiting(tenant, priority, tokens)
        self._queue.add(waiting, now if arrived_at is None else arrived_at)
        self._taken += 1
        queued = self._taken > self._capacity()
        self._departures.arrival(now, queued)
        return AdmissionSlot(self, waiting, unqueued_since=None if queued else now)

    def patience(self, arrived_at: float, refuse: Callable[[Overloaded], None]) -> asyncio.TimerHandle | None:
        """Refuses the request if it waits too long; cancel at the first token. None: no limit."""
        if self._limits.queue_timeout is None:
            return None
        left = max(0.0, arrived_at + self._limits.queue_timeout - self._clock())
        return asyncio.get_running_loop().call_later(left, lambda: refuse(self._waited()))

    def started(self, waiting: Waiting) -> None:
        self._queue.remove(waiting)

    def leave(self, slot: AdmissionSlot) -> None:
        saturated = self._taken > self._capacity()
        slot.start()
        self._taken -= 1
        now = self._clock()
        if slot.unqueued_since is not None:
            self._stay.ended(now - slot.unqueued_since)
        self._departures.departure(now, saturated)

    def overloaded(self, message: str, reason: Reason, queue_time: float) -> Overloaded:
        """Counts a refusal and returns it with the time to retry after."""
        self.refusals[reason] += 1
        return Overloaded(message, reason, retry_hint(queue_time))

    def late(self, message: str) -> DeadlineExceeded:
        self.refusals[DEADLINE] += 1
        return DeadlineExceeded(message)

    def _waited(self) -> Overloaded:
        return self.overloaded("the first token did not come in time", Reason.QUEUE_TIMEOUT, self._return_time())

    def _queue_full(self) -> Overloaded:
        return self.overloaded("too many requests wait", Reason.QUEUE_FULL, self._return_time())

    def _too_many_tokens(self) -> Overloaded:
        return self.overloaded("too many prompt tokens wait", Reason.QUEUED_TOKENS, self._return_time())

    def _return_time(self) -> float:
        """Seconds until all that wait now have left and earlier refused requests have retried."""
        now, capacity = self._clock(), max(1, self._capacity())
        interval = self._departures.expected_interval(now, self._stay.mean, capacity)
        queue_time = max(1, self._taken - capacity) * interval
        return self._returns.next(now, queue_time, interval, interval * capacity)

    def _check_deadline(self, priority: Priority, deadline: float | None, tenant: str) -> None:
        if deadline is None:
            return
        queued = self._taken - self._capacity()
        ahead = min(queued, self._queue.ahead(tenant, priority))
        if ahead > 0 and deadline - self._clock() < ahead * self._departures.interval:
            raise self.late("the deadline cannot be met: the queue is too long")


def _evict(waiting: Waiting, error: Overloaded) -> None:
    evict, waiting.evict = waiting.evict, None
    if evict is not None:
        evict(error)
