"""Wrapper of `sample`: the choice by every parameter there is, for many rows in one launch, after each row's own best
has been found. It needs no scratch; biases and marks have memory for the rows that ask for them.

Same order, ties and noise as `engine.kernels.sampling`, so the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from engine.kernels.build import Kernels
from engine.kernels.launch import Argument, Launch, Shape, prepare
from engine.kernels.linear import CHAIN
from engine.kernels.sampling import ROW_WORDS, SampledRow, write_bias, write_marks

_THREADS = 512
_AHEAD = 6  # copies of 16 bytes that a thread has under way


@dataclass(frozen=True, slots=True)
class BatchSampling:
    """State of a batch's rows at fixed addresses, set by the host between launches."""

    rows: torch.Tensor  # int32 [batch, 16]: packed; zeros leave the row as it is
    tables: torch.Tensor  # int32 [batch]: which table a row has that biases, penalises or bars
    bias: torch.Tensor  # float32 [tables, vocabulary]
    marks: torch.Tensor  # int32 [tables, vocabulary]: seen, barred, times generated; counted on by the kernel

    def first(self, batch: int) -> BatchSampling:
        """The same memory for fewer rows."""
        return replace(self, rows=self.rows[:batch], tables=self.tables[:batch])

    def place(self, at: int, row: SampledRow, table: int | None = None) -> None:
        """Gives a row to a new owner, whose table is written apart."""
        if table is None and (row.biased or row.marked):
            raise ValueError("a row that biases or marks tokens needs a table")
        self.rows[at].copy_(torch.frombuffer(bytearray(row.packed()), dtype=torch.int32))
        self.tables[at].fill_(table or 0)

    def leave(self, at: int) -> None:
        """Leaves a row to what chose before."""
        self.rows[at].zero_()

    def set_bias(self, table: int, biases: Iterable[tuple[int, float]]) -> None:
        """Of the tokens named; of the others none."""
        write_bias(self.bias[table], biases)

    def set_marks(self, table: int, prompt: Sequence[int], output: Sequence[int], barred: Sequence[int]) -> None:
        """What the row has been given and has made so far, and what it must not make yet."""
        write_marks(self.marks[table], prompt, output, barred)


def allocate(batch: int, tables: int, vocabulary: int, device: torch.device) -> BatchSampling:
    """State of so many rows, of which `tables` at once may bias, penalise or bar tokens."""
    return BatchSampling(
        rows=torch.zeros(batch, ROW_WORDS, dtype=torch.int32, device=device),
        tables=torch.zeros(batch, dtype=torch.int32, device=device),
        bias=torch.zeros(tables, vocabulary, dtype=torch.float32, device=device),
        marks=torch.zeros(tables, vocabulary, dtype=torch.int32, device=device),
    )


def sample(
    library: Kernels, state: BatchSampling, logits: torch.Tensor, position: torch.Tensor, best: torch.Tensor
) -> Launch:
    """best int64 [batch] = the best token of each row that asks, as a key whose lower half is the id's complement, of
    logits [batch, vocabulary], float32 or bfloat16. `position` int32 [batch]: of the token being fed; -1 is an idle
    row."""
    if not logits.is_contiguous() or logits.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"logits are float32 or bfloat16 without gaps, not {logits.dtype} {logits.stride()}")
    batch, vocabulary = logits.shape
    values: dict[str, Argument] = {
        "rows": state.rows,
        "tables": state.tables,
        "position": position,
        "logits": logits,
        "biases": state.bias,
        "marks": state.marks,
        "best": best,
    }
    defines = {
        "OP_VOCABULARY": vocabulary,
        "OP_FLOAT32": int(logits.dtype == torch.float32),
        "OP_AHEAD": _AHEAD,
    }
    shared = _AHEAD * _THREADS * 16
    kernel = library.kernel("batch_sampling", "sample", defines, shared)
    return prepare(kernel, Shape((batch, 1, 1), _THREADS, shared), {**values, **CHAIN})
