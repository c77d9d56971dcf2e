"""Who gets in: limits on waiting work, live names, drain, and deadlines that cannot be met.

A ticket is held from the first look at a request until its end; the table of tickets is what is live.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType

from engine.api import Priority, TokenStream
from engine.errors import Aborted, DeadlineExceeded
from service.errors import Draining, DuplicateRequest, Overloaded, UnknownRequest
from service.settings import LimitOptions

_DRAIN_RETRY = 1.0  # seconds
_RETRY_BOUNDS = (0.1, 10.0)  # seconds
_SMOOTHING = 0.1  # weight of the newest interval between departures
_ENOUGH_DEPARTURES = 8  # before that many, nothing is predicted


class Ticket:
    """One live request. Leaving the `with` block gives its place back."""

    def __init__(self, owner: Admission, tenant: str, request_id: str, priority: Priority) -> None:
        self._owner = owner
        self.tenant = tenant
        self.request_id = request_id
        self.priority = priority
        self.prompt_tokens = 0
        self.started = False
        self._stream: TokenStream | None = None
        self._aborted: str | None = None

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner.leave(self)

    def count_prompt(self, tokens: int) -> None:
        """Raises Overloaded where too many prompt tokens wait already. A prompt that waits alone is never too long."""
        self._owner.count_prompt(self, tokens)

    def attach(self, stream: TokenStream) -> None:
        """From here on `abort` reaches the engine. Raises Aborted where it came before."""
        if self._aborted is not None:
            raise Aborted(self._aborted)
        self._stream = stream

    def start(self) -> None:
        """The first token is there: it no longer waits."""
        if not self.started:
            self._owner.start(self)

    def abort(self, reason: str) -> None:
        """Its caller gets Aborted."""
        self._aborted = reason
        if self._stream is not None:
            self._stream.abort(reason)


class Admission:
    """The table of live requests and the limits on it."""

    def __init__(
        self, limits: LimitOptions, capacity: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._capacity = capacity  # sequences that run at once
        self._clock = clock
        self._live: dict[tuple[str, str], Ticket] = {}
        self._tenants: Counter[str] = Counter()
        self._waiting: Counter[Priority] = Counter()  # no first token yet
        self._waiting_tokens = 0
        self._pace = _Pace()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def live(self) -> int:
        """Requests that hold a ticket."""
        return len(self._live)

    @property
    def draining(self) -> bool:
        """Whether nothing new gets in."""
        return self._draining

    def admit(self, tenant: str, request_id: str, priority: Priority, deadline: float | None) -> Ticket:
        """A place in the table. Raises Draining, DuplicateRequest, DeadlineExceeded or Overloaded."""
        if self._draining:
            raise Draining(_DRAIN_RETRY)
        if (tenant, request_id) in self._live:
            raise DuplicateRequest(request_id)
        self._check_deadline(priority, deadline)
        tenant_limit = self._limits.tenant_requests
        if tenant_limit is not None and self._tenants[tenant] >= tenant_limit:
            raise self._overloaded("the tenant has too many live requests", "TENANT_QUOTA")
        if len(self._live) >= self._capacity() + self._limits.queued_requests:
            raise self._overloaded("too many requests wait", "QUEUE_FULL")
        ticket = Ticket(self, tenant, request_id, priority)
        self._live[tenant, request_id] = ticket
        self._tenants[tenant] += 1
        self._waiting[priority] += 1
        self._idle.clear()
        return ticket

    def count_prompt(self, ticket: Ticket, tokens: int) -> None:
        """See Ticket.count_prompt."""
        if self._waiting_tokens > 0 and self._waiting_tokens + tokens > self._limits.queued_prompt_tokens:
            raise self._overloaded("too many prompt tokens wait", "QUEUED_TOKENS")
        self._waiting_tokens += tokens
        ticket.prompt_tokens = tokens

    def start(self, ticket: Ticket) -> None:
        """See Ticket.start."""
        ticket.started = True
        self._waiting[ticket.priority] -= 1
        self._waiting_tokens -= ticket.prompt_tokens

    def leave(self, ticket: Ticket) -> None:
        """Gives the place back."""
        saturated = len(self._live) > self._capacity()
        if not ticket.started:
            self.start(ticket)
        del self._live[ticket.tenant, ticket.request_id]
        self._tenants[ticket.tenant] -= 1
        if not self._tenants[ticket.tenant]:
            del self._tenants[ticket.tenant]
        self._pace.departure(self._clock(), saturated)
        if not self._live:
            self._idle.set()

    def abort(self, tenant: str, request_id: str, reason: str) -> None:
        """Ends a live request. Raises UnknownRequest."""
        ticket = self._live.get((tenant, request_id))
        if ticket is None:
            raise UnknownRequest(request_id)
        ticket.abort(reason)

    def drain(self) -> None:
        """Lets nothing new in, for good."""
        self._draining = True

    async def idle(self, within: float | None) -> int:
        """Waits until nothing is live, `within` seconds at most. Returns what is live then."""
        try:
            async with asyncio.timeout(within):
                await self._idle.wait()
        except TimeoutError:
            pass
        return len(self._live)

    def _check_deadline(self, priority: Priority, deadline: float | None) -> None:
        if deadline is None:
            return
        now = self._clock()
        if deadline <= now:
            raise DeadlineExceeded("the deadline has passed")
        queued = len(self._live) - self._capacity()
        ahead = min(queued, sum(count for other, count in self._waiting.items() if other >= priority))
        if ahead > 0 and deadline - now < ahead * self._pace.interval:
            raise DeadlineExceeded("the deadline cannot be met: the queue is too long")

    def _overloaded(self, message: str, reason: str) -> Overloaded:
        low, high = _RETRY_BOUNDS
        expected = min(max(self._pace.interval, low), high)
        return Overloaded(
            message, reason, expected * random.uniform(1.0, 1.5)
        )  # spread, so that they do not all return at once


class _Pace:
    """How often a place becomes free while others wait for one."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._count = 0
        self._last: float | None = None

    @property
    def interval(self) -> float:
        """Seconds between two departures; 0 while too few were seen."""
        return self._mean if self._count >= _ENOUGH_DEPARTURES else 0.0

    def departure(self, now: float, saturated: bool) -> None:
        """One left. Only intervals during which somebody waited say anything."""
        if saturated and self._last is not None:
            interval = now - self._last
            self._mean = interval if self._count == 0 else self._mean + _SMOOTHING * (interval - self._mean)
            self._count += 1
        self._last = now if saturated else None
