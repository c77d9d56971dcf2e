"""Counts each slot's tokens for the penalties: kept for sequences that have any, and updated when they sample."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from engine.scheduling.sequence_state import SequenceState


class TokenHistory:
    def __init__(self, vocab_size: int, slots: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._device = device
        self._owners: list[SequenceState | None] = [None] * slots  # whose tokens are in a slot's tables
        self._counted = [0] * slots  # tokens counted
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None  # made for the first that asks

    def of(self, sequences: Rows[SequenceState]) -> tuple[torch.Tensor, torch.Tensor]:
        """seen bool, generated float32, both [sequences, vocab]."""
        seen, generated = self._ready()
        for sequence in sequences:
            self._count(sequence, seen, generated)
        slots = torch.tensor([sequence.slot for sequence in sequences], device=self._device)
        return seen.index_select(0, slots), generated.index_select(0, slots)

    def _ready(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._tables is None:
            size = (len(self._counted), self._vocab)
            seen = torch.zeros(size, dtype=torch.bool, device=self._device)
            self._tables = seen, torch.zeros(size, dtype=torch.float32, device=self._device)
        return self._tables

    def _count(self, sequence: SequenceState, seen: torch.Tensor, generated: torch.Tensor) -> None:
        slot, prompt = sequence.slot, sequence.prompt_length
        if self._owners[slot] is not sequence:
            for table in (seen, generated):
                table[slot].zero_()
            self._owners[slot], self._counted[slot] = sequence, 0
        first = self._counted[slot]
        fresh = torch.tensor(sequence.token_ids[first:], dtype=torch.int64, device=self._device)
        self._counted[slot] = len(sequence.token_ids)
        seen[slot].index_fill_(0, fresh, True)
        made = fresh[max(prompt - first, 0) :]
        generated[slot].index_add_(0, made, torch.ones(made.shape, device=self._device))
