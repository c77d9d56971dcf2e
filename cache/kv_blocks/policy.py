"""Selects runs of pages that are worth writing: those used for the second time. Remembers a bounded number of names."""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict


class _BlockSeen(enum.Enum):
    ONCE = 1
    KEPT = 2


class SecondUse:
    """Remembers `names` of them and forgets the least recently used. Thread-safe."""

    def __init__(self, names: int) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, _BlockSeen] = OrderedDict()

    def used(self, name: str) -> bool:
        """True for a name used before, and not known to be in the store."""
        with self._lock:
            before = self._seen.get(name)
            if before is None:
                self._put(name, _BlockSeen.ONCE)
                return False
            self._seen.move_to_end(name)
            return before is _BlockSeen.ONCE

    def kept(self, name: str) -> None:
        with self._lock:
            self._put(name, _BlockSeen.KEPT)

    def lost(self, name: str) -> None:
        """If the name was used before, the next use returns True again."""
        with self._lock:
            if name in self._seen:
                self._put(name, _BlockSeen.ONCE)

    def _put(self, name: str, state: _BlockSeen) -> None:
        self._seen[name] = state
        self._seen.move_to_end(name)
        if len(self._seen) > self._names:
            self._seen.popitem(last=False)
