"""Limits a tenant's tokens, fed and generated, with a bucket that fills at the quota's rate.

A request begins while the bucket holds more than live requests are expected to take, and then runs to its end: the
bucket may fall below zero, and no request begins until it is repaid.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType

from cache.api import BucketSize, SharedBuckets
from service.core.admission.pace import smoothed
from service.core.admission.shared_quota import SharedQuota
from service.core.admission.tenants import NoPolicies, PolicySource, TenantPolicy
from service.core.errors import Overloaded, Reason

_FIRST_GUESS = 0.01  # of the quota, that a tenant's first requests are expected to take
_SHORTEST_HINT = 0.1  # seconds
_LONGEST_HINT = 3600.0  # seconds
_MANY = 4096  # accounts; beyond it, those are forgotten that are as if they were new


class Bill:
    """Charges one request until its `with` block ends; a generation that continues for others is still charged."""

    __slots__ = ("_account", "_expected", "_taken")

    def __init__(self, account: Account | None = None, expected: float = 0.0) -> None:
        self._account = account  # None: without a quota
        self._expected = expected  # tokens that are still held for it
        self._taken = 0

    def __enter__(self) -> Bill:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._account is not None:
            self._account.release(self._expected, self._taken)
            self._expected = 0.0

    def charge(self, tokens: int) -> None:
        if self._account is not None:
            held = min(self._expected, tokens)
            self._expected -= held
            self._taken += tokens
            self._account.charge(tokens, held)


FREE = Bill()


class Account:
    """A tenant's bucket in this server, whatever other servers enforce."""

    def __init__(self, policy: TenantPolicy, shared: SharedQuota | None, clock: Callable[[], float]) -> None:
        self.shared = shared
        self._clock = clock
        self._level = float(policy.most)
        self._filled_at = clock()
        self._held = 0.0  # for live requests, beyond what they have taken
        self._mean: float | None = None  # tokens of a request

    async def open(self, size: BucketSize) -> tuple[Bill, float]:
        """Returns a bill, free where tokens are lacking, and their number."""
        more = _FIRST_GUESS * min(size.most, 60 * size.per_second) if self._mean is None else self._mean
        lacking = self._lacking(size)
        if not lacking and self.shared is not None:
            lacking = await self.shared.lacking(size, more) or self._lacking(size)
        if lacking:
            return FREE, lacking
        self._hold(more)
        return Bill(self, more), 0.0

    def left(self, size: BucketSize) -> float:
        """Negative where tokens must be repaid."""
        now = self._clock()
        self._level = min(size.most, self._level + size.per_second * (now - self._filled_at))
        self._filled_at = now
        return self._level

    def idle(self, size: BucketSize) -> bool:
        """Whether forgetting the account loses nothing."""
        return not self._held and self.left(size) >= size.most and (self.shared is None or self.shared.idle)

    def charge(self, tokens: int, held: float) -> None:
        """Charges tokens, `held` of which were reserved for the request."""
        self._level -= tokens
        if self.shared is not None:
            self.shared.used(tokens)
        self._hold(-held)

    def release(self, held: float, taken: int) -> None:
        """Releases what is left of an ended request's reserve, and learns from `taken`."""
        if taken:
            self._mean = smoothed(self._mean or 0.0, taken, first=self._mean is None)
        self._hold(-held)

    def _lacking(self, size: BucketSize) -> float:
        room = self.left(size) - self._held
        return 0.0 if room > 0 else max(1.0, -room)

    def _hold(self, tokens: float) -> None:
        self._held = max(0.0, self._held + tokens)
        if self.shared is not None:
            self.shared.expect(self._held)


class Quotas:
    def __init__(
        self,
        source: PolicySource | None = None,
        buckets: SharedBuckets | None = None,
        clock: Callable[[], float] = time.monotonic,
        refusals: Counter[str] | None = None,
    ) -> None:
        self._source = source or NoPolicies()
        self._buckets = buckets  # that other servers draw on too
        self._clock = clock
        self._refusals = Counter[str]() if refusals is None else refusals
        self._accounts: dict[str, Account] = {}

    def policy(self, tenant: str) -> TenantPolicy:
        return self._source.policies().of(tenant)

    async def open(self, tenant: str) -> Bill:
        size = _size(self.policy(tenant))
        if size is None:
            return FREE
        bill, lacking = await self._account(tenant).open(size)
        if lacking:
            self._refusals[Reason.TENANT_TOKENS] += 1
            wait = max(_SHORTEST_HINT, (lacking + 1) / size.per_second) * random.uniform(1.0, 1.25)
            raise Overloaded("the tenant has used up its tokens", Reason.TENANT_TOKENS, min(_LONGEST_HINT, wait))
        return bill

    def left(self, tenant: str) -> float | None:
        """None for a tenant without a limit."""
        size, account = _size(self.policy(tenant)), self._accounts.get(tenant)
        if size is None:
            return None
        return size.most if account is None else account.left(size)

    @property
    def in_metrics(self) -> tuple[str, ...]:
        return self._source.policies().in_metrics

    @property
    def breakers(self) -> dict[str, str]:
        return {} if self._buckets is None else {name: state.value for name, state in self._buckets.states.items()}

    def reload(self) -> None:
        self._source.reload()

    async def aclose(self) -> None:
        for account in self._accounts.values():
            if account.shared is not None:
                account.shared.close()
        if self._buckets is not None:
            await self._buckets.aclose()

    def _account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= _MANY:
                self._forget_idle()
            shared = None if self._buckets is None else SharedQuota(tenant, self._buckets, self._clock)
            account = self._accounts[tenant] = Account(self.policy(tenant), shared, self._clock)
        return account

    def _forget_idle(self) -> None:
        for tenant, account in list(self._accounts.items()):
            size = _size(self.policy(tenant))
            if size is None or account.idle(size):
                del self._accounts[tenant]


def _size(policy: TenantPolicy) -> BucketSize | None:
    per_minute = policy.tokens_per_minute
    return None if per_minute is None else BucketSize(per_minute / 60, policy.most)
