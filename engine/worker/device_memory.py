"""How much memory of a GPU is in use, by whatever process."""

from __future__ import annotations

import time
from collections.abc import Callable

_INTERVAL = 1.0  # seconds: the driver is asked no more often


class DeviceMemory:
    """Of the present CUDA device; nothing else is asked."""

    def __init__(
        self, ask: Callable[[], tuple[int, int]] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`ask` gives bytes that are free and that there are; None: the driver does."""
        if ask is None:
            import torch  # seconds that an engine without a GPU need not pay

            ask = torch.cuda.mem_get_info
        self._ask = ask
        self._clock = clock
        self._asked_at = -_INTERVAL
        self._known = (0, 0)

    def read(self) -> tuple[int, int]:
        """Bytes in use and in all, at most a second old; the last ones known where the device is lost."""
        now = self._clock()
        if now - self._asked_at >= _INTERVAL:
            self._asked_at = now
            try:
                free, total = self._ask()
            except RuntimeError:  # which the next step meets as well
                return self._known
            self._known = total - free, total
        return self._known
