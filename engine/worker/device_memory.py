"""Measures a GPU's memory in use by all processes."""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds between two questions to the driver, each of which takes up to 0.2 milliseconds.
_IDLE = 1.0  # where no request waits for the engine
_BUSY = 10.0  # where one does


class DeviceMemory:
    """Measures the present CUDA device only."""

    def __init__(
        self, ask: Callable[[], tuple[int, int]] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`ask` returns free and total bytes; None: the driver does."""
        if ask is None:
            import torch  # seconds that an engine without a GPU need not pay

            ask = torch.cuda.mem_get_info
        self._ask = ask
        self._clock = clock
        self._asked_at = -_BUSY
        self.known = (0, 0)  # bytes in use and in all, as the driver last reported
        self.look(idle=True)

    def look(self, *, idle: bool) -> None:
        """Asks, if it is time. Where the device is lost, the last measurement stays."""
        now = self._clock()
        if now - self._asked_at < (_IDLE if idle else _BUSY):
            return
        self._asked_at = now
        try:
            free, total = self._ask()
        except RuntimeError:  # which the next step meets as well
            return
        self.known = total - free, total
