"""Names entries, and declares the store that holds their bytes."""

from __future__ import annotations

import enum
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

_NAME = re.compile(r"[0-9a-f]{8,128}\Z")


class StoreFault(Exception):
    """Makes a lookup a miss and a count; leaves this package from `flush` alone."""


class InvalidKeyFile(ValueError):
    """The message has file and line, never their content."""


class BreakerState(enum.StrEnum):
    CLOSED = "closed"  # commands are sent
    OPEN = "open"  # none is sent
    PROBING = "probing"  # one is sent, to see


class EntryKind(enum.StrEnum):
    RESPONSE = "r"
    SEMANTIC = "s"
    DIRECTORY = "d"  # which semantic entries a partition has
    EVIDENCE = "v"  # how often semantic candidates were right and wrong
    BLOCK = "k"
    EPOCH = "e"  # a tenant's random number; replacing it makes the tenant's entries unreachable
    LEASE = "l"  # of the replica that generates an answer
    SHARED_GENERATION = "f"  # the answer being generated, as a stream
    QUOTA = "q"  # how many tokens a tenant has left


def is_name(text: str) -> bool:
    return _NAME.match(text) is not None


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Both parts are keyed digests, so that a name reveals nothing about a prompt."""

    kind: EntryKind
    partition: str
    digest: str

    def __post_init__(self) -> None:
        if not is_name(self.partition) or not is_name(self.digest):
            raise ValueError("partition and digest are lower-case hexadecimal")

    @property
    def name(self) -> str:
        return f"{self.kind.value}:{self.partition}:{self.digest}"


@dataclass(frozen=True, slots=True)
class DirectoryPage:
    members: tuple[tuple[str, float], ...]  # (digest, cursor)
    total: int  # members altogether
    cursor: float  # of the last one that was read, also where it was left out as no digest
    more: bool  # whether there may be


class Store(Protocol):
    """Implemented by `memory` and `redis_store`, under one set of contract tests. Every method but `offer` raises
    StoreFault where the store cannot answer in time."""

    async def get_many(self, keys: Sequence[CacheKey], within: float | None = None) -> tuple[bytes | None, ...]:
        """One value a key. `within` shortens the store's own budget, in seconds."""

    async def set(self, key: CacheKey, value: bytes, ttl: float) -> None: ...

    async def set_if_absent(self, key: CacheKey, value: bytes, ttl: float, within: float | None = None) -> bytes:
        """Returns the given value, or an earlier one."""

    def offer(self, key: CacheKey, value: bytes, ttl: float, directory: CacheKey | None = None) -> bool:
        """Sets soon, off the caller's path, and adds the key to the directory. False: dropped under pressure."""

    async def delete_many(self, keys: Sequence[CacheKey]) -> int:
        """Returns how many of them existed."""

    def scan(self, kind: EntryKind, partition: str) -> AsyncIterator[CacheKey]:
        """Yields every live key that was there when the scan began, possibly more."""

    async def members(
        self, directory: CacheKey, after: float, count: int, within: float | None = None
    ) -> DirectoryPage:
        """Begins after a cursor, oldest members first."""

    async def swap(self, key: CacheKey, old: bytes | None, value: bytes, ttl: float) -> bool:
        """Sets if the key still has the old value, or none; whether it did."""

    async def aclose(self) -> None: ...
