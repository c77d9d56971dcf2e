"""Integers that the host sends to a fixed address on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import EngineFailed

_SLOTS = 2  # sendings under way at once
_WORD = 4  # bytes


class Mailbox:
    """Pinned memory on one side, `arrived` on the other. A slot is written again only once its last copy is done.

    By numpy and the driver: a prompt and each change of rows wait for this, and by torch it takes the host twice as
    long. Where there is no memory, of shapes alone, nothing is sent."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._slots = [_Slot(size) for _ in range(_SLOTS)] if device.type == "cuda" else []
        self._next = 0
        self.arrived = torch.zeros(size, dtype=torch.int32, device=device)

    def send(self, values: list[int] | NDArray[np.int32], others: Sequence[tuple[int, NDArray[np.int32]]] = ()) -> None:
        """arrived[: len(values)] = values, and each of the others from its place on, in the order of the current
        stream."""
        if not self._slots:
            return
        slot = self._slots[self._next]
        self._next = (self._next + 1) % _SLOTS
        stream, to = torch.cuda.current_stream().cuda_stream, self.arrived.data_ptr()
        slot.wait()
        for first, part in ((0, values), *others):
            slot.words[first : first + len(part)] = part
            slot.copy(first, len(part), to, stream)
        slot.sent(stream)


class _Slot:
    def __init__(self, size: int) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        self._held = torch.empty(size, dtype=torch.int32, pin_memory=True)
        self._from = self._held.data_ptr()
        event: type[torch.cuda.Event] = torch.cuda.Event
        self._owner = event()
        self._owner.record()  # there is none before
        self._event = driver.CUevent(self._owner.cuda_event)
        self.words: NDArray[np.int32] = self._held.numpy()

    def wait(self) -> None:
        """Until what was sent last has left."""
        self._went(self._driver.cuEventSynchronize(self._event))

    def copy(self, first: int, count: int, to: int, stream: int) -> None:
        """Words [first, first + count) to the same place of `to`."""
        at = _WORD * first
        self._went(self._driver.cuMemcpyHtoDAsync(to + at, self._from + at, _WORD * count, stream))

    def sent(self, stream: int) -> None:
        """All of it is on its way."""
        self._went(self._driver.cuEventRecord(self._event, stream))

    def _went(self, answer: tuple[Any]) -> None:
        if answer[0] != 0:
            raise EngineFailed(f"the GPU takes no copy: {answer[0]}")
