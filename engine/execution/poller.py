"""Waits for the entries that steps write into a ring."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine.errors import EngineFailed

_NAP = 20e-6  # seconds between two looks
_LOOKS = 64  # after so many the stream is asked, which costs more


class IdleWork:
    """Short pieces of work, done while the host waits for a long step. The engine loop sets `piece` once."""

    def __init__(self) -> None:
        self.piece: Callable[[], bool] = lambda: False

    def __call__(self) -> bool:
        return self.piece()


class RingPoller:
    """Waits between two polls of a ring. All steps go to torch's current stream."""

    def __init__(self, nap: float = _NAP, idle_work: IdleWork | None = None) -> None:
        self._nap = nap
        self._idle_work = idle_work or IdleWork()
        self._looks = 0
        self._idle = False  # all that was launched has ended, so its entries are there

    def launched(self) -> None:
        self._idle = False

    def wait(self) -> None:
        """Waits for a moment, or does idle work. Raises where nothing is in flight, and errors of the device."""
        if self._idle:
            raise EngineFailed("the device ended its steps without a token")
        if self._idle_work():
            return
        self._looks += 1
        if self._looks % _LOOKS:
            time.sleep(self._nap)
        else:
            self._idle = torch.cuda.current_stream().query()
