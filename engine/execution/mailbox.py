"""Integers that the host sends to a fixed address on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_SLOTS = 2  # sendings under way at once


class Mailbox:
    """Pinned memory on one side, `arrived` on the other. A slot is written again only once its last copy is done."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._slots = [torch.empty(size, dtype=torch.int32, pin_memory=pinned) for _ in range(_SLOTS)]
        self._sent: list[torch.cuda.Event | None] = [None] * _SLOTS
        self._next = 0
        self.arrived = torch.zeros(size, dtype=torch.int32, device=device)

    def send(self, values: list[int] | NDArray[np.int32], others: Sequence[tuple[int, NDArray[np.int32]]] = ()) -> None:
        """arrived[: len(values)] = values, and each of the others from its place on, in the order of the current
        stream."""
        slot, sent = self._slots[self._next], self._sent[self._next]
        if sent is None:
            event: type[torch.cuda.Event] = torch.cuda.Event
            sent = self._sent[self._next] = event()
        self._next = (self._next + 1) % _SLOTS
        sent.synchronize()
        for first, part in ((0, values), *others):
            words = slice(first, first + len(part))
            slot[words] = torch.as_tensor(part, dtype=torch.int32)
            self.arrived[words].copy_(slot[words], non_blocking=True)
        sent.record(torch.cuda.current_stream())
