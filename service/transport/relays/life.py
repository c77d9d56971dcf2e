"""Detects a hung peer on the link between front and relay, from either end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOKS = 16  # polls in a hang timeout; `silence` returns after one fewer in a row without a message


class SignsOfLife:
    """Counts polls without a message rather than seconds, so that a process that was itself stopped does not mistake
    its own pause for the peer's silence."""

    def __init__(self, timeout: float, ask: Callable[[], object]) -> None:
        """`ask` is called at each poll, and may send a message that the peer answers."""
        self._interval = timeout / LOOKS
        self._ask = ask
        self._heard = True

    def heard(self) -> None:
        self._heard = True

    async def silence(self) -> None:
        """Returns once the peer has sent nothing for 15 to 16 of the timeout's 16 intervals."""
        missed = 0
        while missed < LOOKS - 1:
            self._heard = False
            self._ask()
            await asyncio.sleep(self._interval)
            missed = 0 if self._heard else missed + 1
