"""Counts the processes that died of a constraint, in the front's check and in the engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from engine.constraints.budget import MOST_DEATHS, REFUSED_FOR

_MOST_COUNTED: Final = 1024  # constraints; beyond that the one whose last death is oldest is forgotten


class Deaths:
    """Refuses constraints that killed MOST_DEATHS processes, until REFUSED_FOR seconds after the last death; then
    counts anew."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counted: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # count and time of the last; oldest first

    def add(self, name: bytes) -> int:
        self._forget()
        count, _ = self._counted.pop(name, (0, 0.0))
        self._counted[name] = count + 1, self._clock()
        if len(self._counted) > _MOST_COUNTED:
            self._counted.popitem(last=False)
        return count + 1

    def refused(self, name: bytes) -> bool:
        self._forget()
        count, _ = self._counted.get(name, (0, 0.0))
        return count >= MOST_DEATHS

    def _forget(self) -> None:
        now = self._clock()
        while self._counted and next(iter(self._counted.values()))[1] + REFUSED_FOR <= now:
            self._counted.popitem(last=False)
