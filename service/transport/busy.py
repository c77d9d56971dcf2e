"""Which connections have a call that somebody works for."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection


class BusyPeers:
    """Calls whose message was read and that have not ended, by their connection's name at gRPC. Written by the event
    loop; may be read in another thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live: dict[str, int] = {}
        self._ended: dict[str, float] = {}  # when the last call of a connection did

    def begin(self, peer: str) -> None:
        """One more call of this connection is live."""
        self._live[peer] = self._live.get(peer, 0) + 1

    def end(self, peer: str) -> None:
        """One of them has ended."""
        left = self._live[peer] - 1
        if left:
            self._live[peer] = left
        else:
            self._ended[peer] = self._clock()
            del self._live[peer]

    def idle_since(self, peer: str, accepted: float) -> float | None:
        """None while the connection is busy; `accepted` where it has had no call."""
        return None if peer in self._live else self._ended.get(peer, accepted)

    def keep(self, peers: Collection[str]) -> None:
        """Forgets the connections that there are no more."""
        for peer in tuple(self._ended):
            if peer not in peers:
                self._ended.pop(peer, None)
