"""The executor that does every row on every device, one torch call after another. The others are compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from types import MappingProxyType

import torch

from engine.errors import EngineFailed
from engine.execution.step_state import Parts
from engine.loading.progress import Progress
from engine.model.attention import RowSpan, StepAttention
from engine.model.transformer import StepInput
from engine.scheduling.plan import Row, RowResult
from engine.scheduling.sequence_state import refuse_drafts
from engine.settings import PAGE_SIZE


def why_not(parts: Parts) -> str | None:
    """Nothing stands against it."""
    return None


class Eager:
    """Packs the rows into one ragged batch, runs the model over it, samples."""

    lookahead_tokens = 0
    max_tokens_per_row = 1
    switches: Mapping[str, str | None] = MappingProxyType({})

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._windows = tuple(dict.fromkeys(parts.model.config.windows))

    def warmup(self, progress: Progress) -> None:
        """Nothing to prepare."""

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Every row."""
        return rows

    def switch(self, name: str, enabled: bool) -> None:
        """There is nothing that could be turned off."""

    def close(self) -> None:
        """There is nothing to give back."""

    def run(self, rows: tuple[Row, ...]) -> dict[int, RowResult]:
        """One token for each row that samples."""
        refuse_drafts(rows)
        # Rows of one token first, as attention wants them.
        ordered = sorted(rows, key=lambda row: row.count > 1)
        logits = self.logits(ordered)
        if logits is None:
            return {}
        sampled = [row for row in ordered if row.sample]
        found = self._parts.sampler.sample([self._parts.sequences.of(row) for row in sampled], logits)
        return {row.key: result for row, result in zip(sampled, found, strict=True)}

    def logits(self, rows: Rows[Row]) -> torch.Tensor | None:
        """Feeds rows, those of one token first; float32 [rows that sample, vocab], None where none does."""
        model = self._parts.model
        hidden = model.forward(self._pack(rows), self._parts.pool)
        return model.logits(hidden) if hidden.shape[0] else None

    def _pack(self, rows: Rows[Row]) -> StepInput:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sampled: list[int] = []
        spans: list[RowSpan] = []
        for row in rows:
            sequence, end = self._parts.sequences.of(row), row.start + row.count
            pages = sequence.pages
            spans.append(RowSpan(len(token_ids), row.count, row.start, pages))
            token_ids += sequence.token_ids[row.start : end]
            positions += range(row.start, end)
            slots += [pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in range(row.start, end)]
            if row.sample:
                sampled.append(len(token_ids) - 1)
        if not 0 <= min(token_ids) <= max(token_ids) < self._parts.model.config.vocab_size:
            # On a GPU the lookup itself would take the whole process down.
            raise EngineFailed("a token id lies outside the vocabulary")
        device = self._parts.model.placement.device
        packed = torch.tensor((token_ids, positions, slots), device=device)
        return StepInput(
            token_ids=packed[0],
            positions=packed[1],
            slots=packed[2],
            attention=StepAttention(spans, self._windows, self._parts.pool, device),
            sampled=None if len(sampled) == len(token_ids) else torch.tensor(sampled, dtype=torch.int64, device=device),
        )
