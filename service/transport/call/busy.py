"""Tracks which connections have a call in flight, so that the evictor closes idle connections only."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection


class BusyPeers:
    """Counts each connection's calls from the read of their message to their end, keyed by gRPC's peer name. The event
    loop writes; another thread may call `idle_since` and `keep`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live: dict[str, int] = {}
        self._ended: dict[str, float] = {}  # by connection: when its last call ended, on the clock

    def begin(self, peer: str) -> None:
        self._live[peer] = self._live.get(peer, 0) + 1

    def end(self, peer: str) -> None:
        left = self._live[peer] - 1
        if left:
            self._live[peer] = left
        else:
            self._ended[peer] = self._clock()
            del self._live[peer]

    def idle_since(self, peer: str, accepted: float) -> float | None:
        """Returns when the last call ended, or `accepted` where there was none; None while the connection is busy."""
        return None if peer in self._live else self._ended.get(peer, accepted)

    def keep(self, peers: Collection[str]) -> None:
        """Forgets all connections but the open `peers`."""
        for peer in tuple(self._ended):
            if peer not in peers:
                self._ended.pop(peer, None)
