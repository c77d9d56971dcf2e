"""Chooses the connections to close where a port has too many, without sockets or clocks. A connection is busy, and
never chosen, while it has a call whose message was read."""

from __future__ import annotations

import heapq
import ipaddress
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

_LARGEST_SHARE = 3, 4  # of a port's connections, for one address
_RESERVED_SHARE = 1, 8  # of a port's connections, for the loopback: probes and proxies of this machine
_NETWORK = 64  # bits of an IPv6 address that identify a caller, who usually has all addresses of that prefix


@dataclass(frozen=True, slots=True)
class Host:
    """An IPv4 address, or the first _NETWORK bits of an IPv6 address."""

    name: str
    local: bool  # whether it is a loopback address

    @classmethod
    @lru_cache(1024)
    def of(cls, address: str) -> Host:
        """Parses an address as getpeername returns it. An IPv4-mapped IPv6 address counts as IPv4."""
        found = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(found, ipaddress.IPv6Address):
            if found.ipv4_mapped is None:
                network = ipaddress.IPv6Network((int(found), _NETWORK), strict=False)
                return cls(str(network.network_address), found.is_loopback)
            found = found.ipv4_mapped
        return cls(str(found), found.is_loopback)


class Held(Protocol):
    @property
    def host(self) -> Host: ...

    @property
    def idle_since(self) -> float | None:
        """When its last call ended, or else when it was accepted, on any clock; None while it is busy."""


_Held = TypeVar("_Held", bound=Held)


def surplus(held: Iterable[_Held], bound: int) -> list[_Held]:
    """Returns the connections to close, in order; fewer where too many are busy.

    At most `bound` are left: one address has at most three quarters, and other machines together seven eighths.
    The address with the most idle connections loses one first: the one that has been idle longest.
    """
    ordered = _Idle(held)
    for host, count in tuple(ordered.counts.items()):
        for _ in range(count - _part(bound, _LARGEST_SHARE)):
            ordered.take(host)
    remote = sum(count for host, count in ordered.counts.items() if not host.local)
    ordered.take_crowded(remote - (bound - _part(bound, _RESERVED_SHARE)), local=False)
    ordered.take_crowded(ordered.count - bound, local=True)
    return ordered.taken


def first_to_go(held: Iterable[_Held]) -> _Held | None:
    """Chooses the connection to close for a new one where a port is full, as `surplus`. None where all are busy."""
    ordered = _Idle(held)
    ordered.take_crowded(1, local=True)
    return ordered.taken[0] if ordered.taken else None


class _Idle(Generic[_Held]):
    """Queues the idle connections of each address, longest idle first. `taken` collects those to close."""

    def __init__(self, held: Iterable[_Held]) -> None:
        self.counts: dict[Host, int] = defaultdict(int)  # connections that are not taken, busy ones included
        self.taken: list[_Held] = []
        idle: dict[Host, list[tuple[float, int, _Held]]] = defaultdict(list)
        for place, one in enumerate(held):
            self.counts[one.host] += 1
            if (since := one.idle_since) is not None:
                idle[one.host].append((since, place, one))
        self._idle = {host: deque(sorted(mine)) for host, mine in idle.items()}

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    def take(self, host: Host) -> None:
        if mine := self._idle.get(host):
            self.taken.append(mine.popleft()[2])
            self.counts[host] -= 1

    def take_crowded(self, number: int, *, local: bool) -> None:
        """Takes up to `number` connections, each from the address that then has most idle ones. `local` includes
        loopback addresses."""
        crowds = [self._rank(host) for host, mine in self._idle.items() if mine and (local or not host.local)]
        heapq.heapify(crowds)
        while number > 0 and crowds:
            *_, host = heapq.heappop(crowds)
            self.take(host)
            number -= 1
            if self._idle[host]:
                heapq.heappush(crowds, self._rank(host))

    def _rank(self, host: Host) -> tuple[int, float, str, bool, Host]:
        """The first to lose a connection is smallest: by its idle connections, then by how long one has been idle."""
        mine = self._idle[host]
        return -len(mine), mine[0][0], host.name, host.local, host


def _part(bound: int, share: tuple[int, int]) -> int:
    return bound * share[0] // share[1]
