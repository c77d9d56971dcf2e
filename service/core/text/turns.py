"""Who may go on, so many at a time: those who wait are let on in turns of one for each sender."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Belongs to one event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by sender; whose turn it is first

    async def acquire(self, sender: str) -> None:
        """Returns when it is its turn, which `release` ends."""
        if self._free and not self._waiting:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(sender, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(sender, turn)
            else:  # it was let on in the same moment
                self.release()
            raise

    def release(self) -> None:
        """Lets the next one on."""
        while self._waiting:
            sender = next(iter(self._waiting))
            line = self._waiting.pop(sender)
            turn = line.popleft()
            if line:
                self._waiting[sender] = line  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _forget(self, sender: str, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(sender)
        if line is not None and turn in line:
            line.remove(turn)
            if not line:
                del self._waiting[sender]
