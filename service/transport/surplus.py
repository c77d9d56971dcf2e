"""Which connections of a port are closed where there are too many: a pure choice, without sockets or clocks.

A port keeps some descriptors beyond its bound, so that a newcomer is accepted first and an idle connection goes for it.
A connection is busy while it has a call whose message was read; those are never chosen.
"""

from __future__ import annotations

import heapq
import ipaddress
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

_LARGEST_SHARE = 3, 4  # of a port's connections, for one address
_RESERVED_SHARE = 1, 8  # of them, for the loopback: probes and proxies of this machine
_NETWORK = 64  # bits of an IPv6 address that stand for one caller, who has all addresses below them


@dataclass(frozen=True, slots=True)
class Host:
    """Who is at the other end, as far as its address says."""

    name: str
    local: bool  # this machine, by the loopback

    @classmethod
    def of(cls, address: str) -> Host:
        """`address`: as getpeername gives it."""
        found = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(found, ipaddress.IPv6Address):
            if found.ipv4_mapped is None:
                network = ipaddress.IPv6Network((int(found), _NETWORK), strict=False)
                return cls(str(network.network_address), found.is_loopback)
            found = found.ipv4_mapped
        return cls(str(found), found.is_loopback)


class Held(Protocol):
    """A connection."""

    @property
    def host(self) -> Host: ...

    @property
    def idle_since(self) -> float | None:
        """When it was accepted or its last call ended, on any clock; None while it is busy."""


_Held = TypeVar("_Held", bound=Held)


def surplus(held: Iterable[_Held], bound: int) -> list[_Held]:
    """Those to close, so that at most `bound` are left, of which one address has at most three quarters, and addresses
    of other machines together seven eighths. The address with the most idle connections gives first, of one address the
    one that has been idle longest. Fewer, where too many are busy."""
    ordered = _Idle(held)
    for host, count in tuple(ordered.counts.items()):
        for _ in range(count - _part(bound, _LARGEST_SHARE)):
            ordered.take(host)
    remote = sum(count for host, count in ordered.counts.items() if not host.local)
    ordered.take_crowded(remote - (bound - _part(bound, _RESERVED_SHARE)), local=False)
    ordered.take_crowded(ordered.count - bound, local=True)
    return ordered.taken


def first_to_go(held: Iterable[_Held]) -> _Held | None:
    """Which one gives way to a newcomer, where a port is full: the one that has been idle longest, of the address with
    the most. None where all are busy."""
    ordered = _Idle(held)
    ordered.take_crowded(1, local=True)
    return ordered.taken[0] if ordered.taken else None


class _Idle(Generic[_Held]):
    """Idle connections of each address, the one that has been idle longest first."""

    def __init__(self, held: Iterable[_Held]) -> None:
        self.counts: dict[Host, int] = defaultdict(int)  # busy ones included
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
        """The next of this address, if there is one."""
        if mine := self._idle.get(host):
            self.taken.append(mine.popleft()[2])
            self.counts[host] -= 1

    def take_crowded(self, number: int, *, local: bool) -> None:
        """So many of whichever address has the most; `local`: of this machine's too."""
        crowds = [self._rank(host) for host, mine in self._idle.items() if mine and (local or not host.local)]
        heapq.heapify(crowds)
        while number > 0 and crowds:
            *_, host = heapq.heappop(crowds)
            self.take(host)
            number -= 1
            if self._idle[host]:
                heapq.heappush(crowds, self._rank(host))

    def _rank(self, host: Host) -> tuple[int, float, str, Host]:
        """The smallest gives first: by number, then by how long the next of it has been idle."""
        mine = self._idle[host]
        return -len(mine), mine[0][0], host.name, host


def _part(bound: int, share: tuple[int, int]) -> int:
    return bound * share[0] // share[1]
