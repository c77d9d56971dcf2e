"""Admits requests by live names, quotas, drain, and a bound on all live requests. The table of tickets is the list of
live requests; `admission_slots` bounds what the engine runs."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from engine.errors import Aborted
from service.config.settings import LimitOptions
from service.core.admission.admission_slots import AdmissionSlots
from service.core.admission.pace import RequestDuration
from service.core.admission.quotas import Quotas
from service.core.errors import Draining, DuplicateRequest, Reason, UnknownRequest

_DRAIN_RETRY = 1.0  # seconds
_MOST_LOOKUPS = 512  # requests that are tokenized or ask the caches; more only where as many may be in the engine


@dataclass(frozen=True, slots=True)
class TenantUse:
    tenant: str
    live: int  # requests
    tokens_left: float | None  # negative: to be paid back; None: without a quota


class Abortable(Protocol):
    def abort(self, reason: str) -> None: ...


class Ticket:
    """A live request, until its `with` block ends."""

    def __init__(self, owner: Admission, tenant: str, request_id: str, since: float, answers: int) -> None:
        self._owner = owner
        self.answers = answers
        self.tenant = tenant
        self.since = since  # on the admission's clock
        self.request_id = request_id
        self.in_lookup = True
        self._answer: Abortable | None = None
        self._aborted: str | None = None

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner.leave(self)

    def lookup_ended(self) -> None:
        if self.in_lookup:
            self.in_lookup = False
            self._owner.lookup_ended()

    def attach(self, answer: Abortable) -> None:
        """Makes `abort` reach this answer. Raises Aborted where the abort came first."""
        if self._aborted is not None:
            raise Aborted(self._aborted)
        self._answer = answer

    def abort(self, reason: str) -> None:
        self._aborted = reason
        if self._answer is not None:
            self._answer.abort(reason)


class Admission:
    def __init__(
        self,
        limits: LimitOptions,
        capacity: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        refusals: Counter[str] | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self.quotas = quotas or Quotas()
        self.slots = AdmissionSlots(limits, capacity, clock, refusals)
        self._limits = limits
        self._clock = clock
        self._live: dict[tuple[str, str], Ticket] = {}
        self._tenants: Counter[str] = Counter()
        self._stay = RequestDuration()
        self._in_lookup = 0
        self._unnamed = itertools.count()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def uses(self) -> tuple[TenantUse, ...]:
        quotas = self.quotas
        return tuple(TenantUse(name, self._tenants[name], quotas.left(name)) for name in quotas.in_metrics)

    @property
    def in_lookup(self) -> int:
        """How many live requests a cache may still answer."""
        return self._in_lookup

    @property
    def draining(self) -> bool:
        return self._draining

    def check_unread(self, tenant: str) -> None:
        if not self._draining:  # later requests get that answer
            self.slots.check_unread(tenant)

    def admit(self, tenant: str, request_id: str | None, deadline: float | None, answers: int = 1) -> Ticket:
        """Without a request id, `abort` cannot reach the request. Raises Draining, DuplicateRequest, DeadlineExceeded
        or Overloaded."""
        if self._draining:
            self.slots.refusals[Reason.DRAINING] += 1
            raise Draining(_DRAIN_RETRY * random.uniform(1.0, 1.5))
        if request_id is None:
            request_id = f"\0{next(self._unnamed)}"  # no caller's name has such a character
        if (tenant, request_id) in self._live:
            raise DuplicateRequest(request_id)
        if deadline is not None and deadline <= self._clock():
            raise self.slots.late("the deadline has passed")
        tenant_limit = self.quotas.policy(tenant).requests or self._limits.tenant_requests
        if tenant_limit is not None and self._tenants[tenant] + answers > tenant_limit:
            one_leaves = self._stay.mean / tenant_limit
            raise self.slots.overloaded("the tenant has too many live requests", Reason.TENANT_QUOTA, one_leaves)
        if len(self._live) >= self._limits.live_requests or self._in_lookup >= max(_MOST_LOOKUPS, self.slots.total):
            one_leaves = self._stay.mean / len(self._live)
            raise self.slots.overloaded("too many requests are live", Reason.LIVE_REQUESTS, one_leaves)
        ticket = Ticket(self, tenant, request_id, self._clock(), answers)
        self._live[tenant, request_id] = ticket
        self._tenants[tenant] += answers
        self._in_lookup += 1
        self._idle.clear()
        return ticket

    def lookup_ended(self) -> None:
        self._in_lookup -= 1

    def leave(self, ticket: Ticket) -> None:
        ticket.lookup_ended()
        self._stay.ended(self._clock() - ticket.since)
        del self._live[ticket.tenant, ticket.request_id]
        self._tenants[ticket.tenant] -= ticket.answers
        if not self._tenants[ticket.tenant]:
            del self._tenants[ticket.tenant]
        if not self._live:
            self._idle.set()

    def abort(self, tenant: str, request_id: str, reason: str) -> None:
        ticket = self._live.get((tenant, request_id))
        if ticket is None:
            raise UnknownRequest(request_id)
        ticket.abort(reason)

    def drain(self) -> None:
        self._draining = True

    def resume(self) -> None:
        self._draining = False

    async def idle(self, within: float | None) -> int:
        """Returns how many requests are still live, after `within` seconds at most."""
        try:
            async with asyncio.timeout(within):
                await self._idle.wait()
        except TimeoutError:
            pass
        return len(self._live)
