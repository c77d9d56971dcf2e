"""Declares token buckets that several servers draw on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cache.api.stores import BreakerState


@dataclass(frozen=True, slots=True)
class BucketSize:
    per_second: float
    most: float


@dataclass(frozen=True, slots=True)
class Grant:
    tokens: float  # that it may use from now on; negative: that many it gave back
    level: float  # what the bucket has afterwards; negative: what it is owed


class SharedBuckets(Protocol):
    """Buckets by tenant. A new one is full."""

    @property
    def budget(self) -> float:
        """Seconds that a request may wait for tokens."""

    @property
    def states(self) -> Mapping[str, BreakerState]:
        pass

    async def settle(self, tenant: str, size: BucketSize, owed: float, wanted: float) -> Grant:
        """Takes what is owed whether or not it is there, and of `wanted` what is; a negative one gives back. Where it
        raises StoreFault, whether anything was taken is not known."""

    async def aclose(self) -> None: ...
