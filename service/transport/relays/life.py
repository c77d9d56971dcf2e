"""Whether the other end of a link still runs: a front that waits for its relay, or a relay for its front."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOKS = 16  # in a hang timeout; silence ends in the last of them


class SignsOfLife:
    """Counts looks without a message rather than seconds: an end that was itself held up, or stopped, does not take
    that for the other one's silence."""

    def __init__(self, timeout: float, ask: Callable[[], object]) -> None:
        """`timeout`: seconds. `ask`: sends what the other end answers, or waits for."""
        self._interval = timeout / LOOKS
        self._ask = ask
        self._heard = True

    def heard(self) -> None:
        """Something came."""
        self._heard = True

    async def silence(self) -> None:
        """Asks at every look. Returns once nothing has come for between 15 and 16 of them."""
        missed = 0
        while missed < LOOKS - 1:
            self._heard = False
            self._ask()
            await asyncio.sleep(self._interval)
            missed = 0 if self._heard else missed + 1
