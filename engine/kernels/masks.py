"""Masks of the tokens that rows may choose."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from engine.kernels.capture import Mailbox

_OPEN = -1  # a word that allows all its tokens


class TokenMasks:
    """Masks of `rows` rows at a fixed address. At first they allow every token."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._words = np.full((rows, -(-vocabulary // 32)), _OPEN, dtype=np.int32)
        self._mailbox = Mailbox(self._words.size, device)
        self._mailbox.arrived.fill_(_OPEN)
        self._masked: set[int] = set()  # rows that are not open

    @property
    def arrived(self) -> torch.Tensor:
        """Returns the masks, int32 [rows, words]."""
        return self._mailbox.arrived.view(self._words.shape)

    def send(self, masks: Mapping[int, bytes | bytearray]) -> None:
        """Sets the masks of these rows, in the order of the current stream; the others may choose every token."""
        if not masks and not self._masked:
            return
        for row in self._masked - masks.keys():
            self._words[row] = _OPEN
        for row, mask in masks.items():
            bits = self._words[row].view(np.uint8)
            size = min(len(mask), len(bits))
            bits[:size] = np.frombuffer(mask, dtype=np.uint8, count=size)
            bits[size:] = 0  # ids beyond a mask have no text
        self._masked = set(masks)
        self._mailbox.send(self._words.reshape(-1))
