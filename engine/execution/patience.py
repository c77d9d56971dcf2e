"""How the host waits for what steps on a GPU tell it through pinned memory."""

from __future__ import annotations

import time

import torch

from engine.errors import EngineFailed
from engine.execution.meanwhile import Meanwhile

_NAP = 20e-6  # seconds between two looks
_LOOKS = 64  # after so many the stream is asked, which costs more


def all_told(entries: torch.Tensor, number: int) -> list[int] | None:
    """flags << 24 | token of each, once the device has written all of them as those of this number."""
    if not ((entries >> 32) & 0xFFFFFFFF == number & 0xFFFFFFFF).all():
        return None
    found: list[int] = (entries & 0xFFFFFFFF).tolist()
    return found


class Patience:
    """Of one device's steps, which all go to torch's current stream."""

    def __init__(self, nap: float = _NAP, meanwhile: Meanwhile | None = None) -> None:
        self._nap = nap
        self._meanwhile = meanwhile or Meanwhile()
        self._looks = 0
        self._idle = False  # all that was launched has ended, so what it told is there

    def launched(self) -> None:
        """A step is under way."""
        self._idle = False

    def wait(self) -> None:
        """A moment, in which other work may be done. Raises where nothing is under way, and what went wrong on the
        device."""
        if self._idle:
            raise EngineFailed("the device ended its steps without a token")
        if self._meanwhile():
            return
        self._looks += 1
        if self._looks % _LOOKS:
            time.sleep(self._nap)
        else:
            self._idle = torch.cuda.current_stream().query()
