"""Which tokens rows may choose, as the kernels read it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from engine.execution.mailbox import Mailbox
from engine.execution.pipeline import Mask

_OPEN = -1  # a word that allows all its tokens


class TokenMasks:
    """Of so many rows, at a fixed address; every token at first."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._words = np.full((rows, -(-vocabulary // 32)), _OPEN, dtype=np.int32)
        self._mail = Mailbox(self._words.size, device)
        self._mail.arrived.fill_(_OPEN)
        self._told: set[int] = set()  # rows that are not open

    @property
    def arrived(self) -> torch.Tensor:
        """int32 [rows, words]."""
        return self._mail.arrived.view(self._words.shape)

    def tell(self, masks: Mapping[int, Mask]) -> None:
        """What these rows may choose from here on in the order of the current stream; the others may choose all."""
        if not masks and not self._told:
            return
        for row in self._told - masks.keys():
            self._words[row] = _OPEN
        for row, mask in masks.items():
            bits = self._words[row].view(np.uint8)
            size = min(len(mask), len(bits))
            bits[:size] = np.frombuffer(mask, dtype=np.uint8, count=size)
            bits[size:] = 0  # ids beyond a mask have no text
        self._told = set(masks)
        self._mail.send(self._words.reshape(-1))
