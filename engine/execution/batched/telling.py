"""What the device is told of rows that come, go and move, and which of them choose by more than temperature: these have
biases and marks where they ask for them, and nobody else has memory for any.

Torch's allocator gives memory back in the order of the stream, so that steps under way for a row that has left count in
nobody else's marks.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from engine.execution import device_sampling as sampled
from engine.execution.batched.pipeline import BatchRow, Changes
from engine.kernels import rows as states
from engine.kernels.batch_sampling import Tables
from engine.sampling.noise import seed_key
from engine.scheduling.sequence_state import SequenceState


@dataclass(frozen=True, slots=True)
class Said:
    """Of some changes, in the order in which the device is to hear of it."""

    tables: Items[Tables]  # for `batch_sampling.fill`
    told: Items[list[int]]  # for `rows.change`
    moves: Items[list[int]]  # likewise, and last, since they carry what the others have said


class Telling:
    """Remembers by row state who asks for the sampling stages."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._asking: dict[int, Tables | None] = {}

    def sampled(self, rows: int) -> bool:
        """Whether one of the first so many row states asks for the stages."""
        return any(index < rows for index in self._asking)

    def rehearsal(self) -> Tables:
        """Of nobody: what is done once before the first row comes."""
        return Tables(bias=self._table(torch.float32), marks=self._table(torch.int32), given=(0,))

    def tell(self, changes: Changes) -> Said:
        """What these changes are in words."""
        for index in changes.left:
            self._asking.pop(index, None)
        told = [[states.LEAVE, index] for index in changes.left]
        told += [[states.PAGES, index, first, len(pages), *pages] for index, first, pages in changes.paged]
        tables = []
        for own in changes.entered:
            packed, held = self._enter(own.index, own.sequence)
            told.append(_entering(own, packed).words())
            if held is not None:
                tables.append(held)
        for to, source in changes.moved:
            self._asking.pop(to, None)
            if source in self._asking:
                self._asking[to] = self._asking.pop(source)
        return Said(tables, told, [[states.MOVE, to, source] for to, source in changes.moved])

    def _enter(self, index: int, sequence: SequenceState) -> tuple[bytes | None, Tables | None]:
        """Its parameters as the kernel reads them, and its tables; None where it has none."""
        self._asking.pop(index, None)
        row = sampled.sampled_row(sequence) if sampled.beyond_temperature(sequence) else None
        if row is None:
            return None, None
        self._asking[index] = None
        if not (row.biased or row.marked):
            return row.packed(), None
        bias = self._table(torch.float32) if row.biased else None
        marks = self._table(torch.int32) if row.marked else None
        self._asking[index] = Tables(bias=bias, marks=marks)
        ids, prompt = sequence.token_ids if row.marked else [], sequence.prompt_length
        tables = Tables(
            bias=bias,
            marks=marks,
            given=ids[:prompt],
            made=ids[prompt:],
            barred=sequence.stopping.stop_token_ids if row.marked else (),
            biases=sequence.sampling.logit_bias,
        )
        return row.packed(*tables.addresses), tables

    def _table(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self._vocabulary, dtype=dtype, device=self._device)


def _entering(own: BatchRow, packed: bytes | None) -> states.Entering:
    sequence, stops = own.sequence, own.sequence.stopping.stop_token_ids
    return states.Entering(
        index=own.index,
        token=sequence.token_ids[own.first],
        position=own.first,
        last=own.last,
        free_from=sequence.prompt_length + sequence.stopping.min_tokens if stops else 0,
        temperature=0.0 if packed else sequence.sampling.temperature,  # `pick` would draw for nothing
        noise_key=seed_key(sequence.sampling.seed),
        stops=stops,
        sampled=packed,
        pages=sequence.pages[: own.pages],
    )
