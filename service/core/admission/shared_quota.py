"""Holds one tenant's share of a quota that several servers draw on.

A round trip per request would cost too much, so a server borrows about a hundredth of the quota, and what its live
requests are expected to take. The next loan repays what answers took beyond: servers exceed a quota only by that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cache.api import BucketSize, SharedBuckets, StoreFault

_SHARE = 0.01  # of the quota, borrowed beyond what is expected
_PAUSE = 0.05  # seconds between loans that no request waits for
_LAPSE = 60.0  # seconds after which tokens that were borrowed and not used have lapsed
_FAULT = 1.0  # seconds without loans after the store failed
_SHORTEST_EMPTY = 0.01  # seconds until an empty bucket is asked again
_LONGEST_EMPTY = 1.0  # the same: by then the file may allow more, or another server have given back


class SharedQuota:
    """Tokens borrowed by this server. Used from one event loop."""

    def __init__(self, tenant: str, buckets: SharedBuckets, clock: Callable[[], float]) -> None:
        self._tenant = tenant
        self._buckets = buckets
        self._clock = clock
        self._size = BucketSize(1.0, 1.0)
        self._spare = 1.0  # tokens that are borrowed beyond what is expected
        self._expected = 0.0  # tokens that live requests are still to take
        self._coming = 0.0  # that those are to take who wait for a loan
        self._credit = 0.0  # tokens borrowed and not used; negative: used and not borrowed
        self._owed = 0.0  # by all servers, when last asked
        self._asked_at = clock()
        self._empty_until = 0.0
        self._down_until = 0.0  # 0: it is not known to be down
        self._loan: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        return self._loan is None and self._timer is None and self._credit >= 0

    async def lacking(self, size: BucketSize, more: float) -> float:
        """Returns the tokens lacking for one more request; 0, too, where the store does not answer in time. The caller
        must `expect` its tokens at once."""
        self._size = size
        self._spare = max(1.0, _SHARE * min(size.most, 60 * size.per_second))
        until = self._clock() + self._buckets.budget
        self._coming += more
        try:
            while (lacks := self._lacking()) is None:
                patience = until - self._clock()
                if patience <= 0:
                    return 0.0
                await asyncio.wait([self._borrow()], timeout=patience)
            return lacks
        finally:
            self._coming -= more

    def expect(self, tokens: float) -> None:
        self._expected = tokens
        self._soon()

    def used(self, tokens: float) -> None:
        """While the store is down, tokens count in the server's own bucket alone."""
        if not self._down_until or self._clock() >= self._down_until:
            self._credit -= tokens

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._loan is not None:
            self._loan.cancel()

    def _lacking(self) -> float | None:
        """None: a loan is needed first."""
        now = self._clock()
        if now < self._down_until:
            return 0.0
        if now - self._asked_at > _LAPSE:
            self._credit = min(self._credit, 0.0)
        room = self._credit - self._expected
        if room > 0:
            return 0.0
        return max(1.0, self._owed - room) if now < self._empty_until else None

    def _soon(self) -> None:
        room = self._credit - self._expected
        if self._spare / 2 <= room <= 3 * self._spare or self._timer is not None or self._loan is not None:
            return  # as for nearly every token
        now = self._clock()
        if now < self._down_until:
            return
        if self._credit < 0 or room > 3 * self._spare or (room < self._spare / 2 and now >= self._empty_until):
            self._timer = asyncio.get_running_loop().call_later(_PAUSE, self._borrow)

    def _borrow(self) -> asyncio.Task[None]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loan is None:
            self._loan = asyncio.get_running_loop().create_task(self._settle(), name="quota")
        return self._loan

    async def _settle(self) -> None:
        owed = max(0.0, -self._credit)
        wanted = self._expected + self._coming + self._spare - max(0.0, self._credit)
        try:
            grant = await self._buckets.settle(self._tenant, self._size, owed, wanted)
        except StoreFault:
            self._credit = 0.0
            self._down_until = self._clock() + _FAULT
            return
        finally:
            self._loan = None
        now = self._clock()
        self._asked_at, self._down_until = now, 0.0
        self._credit += owed + grant.tokens
        self._owed = max(0.0, -grant.level)
        if grant.tokens < wanted:
            lacks = self._owed + max(0.0, self._expected - self._credit)
            self._empty_until = now + min(_LONGEST_EMPTY, max(_SHORTEST_EMPTY, lacks / self._size.per_second))
