"""Grants a limited number of turns, one sender after another."""

from __future__ import annotations

import asyncio
from collections import Counter, deque


class FairTurns:
    """Grants `count` turns at a time, at most `each` of them to one sender. Belongs to one event loop."""

    def __init__(self, count: int, each: int | None = None) -> None:
        self._free = count
        self._each = count if each is None else each
        self._running = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by sender; whose turn it is first

    async def acquire(self, sender: str) -> None:
        if self._free and self._running[sender] < self._each and sender not in self._waiting:
            self._start(sender)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(sender, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(sender, turn)
            else:  # it was let on in the same moment
                self.release(sender)
            raise

    def release(self, sender: str) -> None:
        self._free += 1
        self._running[sender] -= 1
        if not self._running[sender]:
            del self._running[sender]
        while self._free and (other := self._next()) is not None:
            line = self._waiting.pop(other)
            turn = line.popleft()
            if line:
                self._waiting[other] = line  # behind the others
            if not turn.done():
                self._start(other)
                turn.set_result(None)

    def _start(self, sender: str) -> None:
        self._free -= 1
        self._running[sender] += 1

    def _next(self) -> str | None:
        return next((sender for sender in self._waiting if self._running[sender] < self._each), None)

    def _forget(self, sender: str, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(sender)
        if line is not None and turn in line:
            line.remove(turn)
            if not line:
                del self._waiting[sender]
