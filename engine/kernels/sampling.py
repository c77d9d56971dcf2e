"""Wrapper of `sampling`: the four launches between `head` and `advance` that choose by every parameter, and their
state. The head serves a row that needs none of it.

Order and ties are those of `engine.sampling.sampler`: bias, penalties, barred tokens, temperature, top_k, top_p, min_p,
a draw.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch

from engine.kernels.attention import RowPages
from engine.kernels.build import BuildError, Kernels
from engine.kernels.launch import Argument, Launch, Shape, Trigger, prepare
from engine.kernels.linear import Normed
from engine.kernels.tokens import Choice, TwoPasses, two_pass_launch

COLDEST = 1e-20  # temperatures below it are not numbers in float32
SEEN, BARRED, COUNT = -(1 << 31), 1 << 30, (1 << 30) - 1  # of a mark
_ON, _BIASED, _MARKED, _FILTERED = 1, 2, 4, 8
_ROW = struct.Struct("<2i5fid q2Q")
ROW_WORDS = _ROW.size // 4
_BINS, _LISTED = 2048, 4096
_THREADS, _EACH = 512, 4
_BOUNDS = 256  # multiprocessors, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    temperature: float  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    free_from: int = 0  # the position from which barred tokens may stand
    noise_key: int = 0  # `engine.sampling.noise.seed_key`
    biased: bool = False  # whether the row has biases
    marked: bool = False  # whether it has penalties or barred tokens

    def within_top(self, most: int) -> bool:
        """Whether the row needs no more than the model's logits of its `most` likeliest tokens."""
        return self.temperature > 0 and 0 < self.top_k <= most and not (self.biased or self.marked)

    @property
    def heat(self) -> float:
        return max(self.temperature, COLDEST) if self.temperature > 0 else 0.0

    @property
    def floor(self) -> float:
        return float(torch.tensor(self.min_p, dtype=torch.float32).log())

    def packed(self, bias: int = 0, marks: int = 0) -> bytes:
        """The row as the kernels read it. `bias`, `marks`: addresses of its own tables, if any."""
        filtered = self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)
        uses = _ON | _BIASED * self.biased | _MARKED * self.marked | _FILTERED * filtered
        return _ROW.pack(
            uses,
            min(self.top_k, 2**31 - 1),
            self.heat,
            self.floor,
            self.repetition,
            self.presence,
            self.frequency,
            self.free_from,
            self.top_p,
            self.noise_key,
            bias,
            marks,
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """The host sets rows, heat, bias and marks between launches."""

    rows: torch.Tensor  # int32 [batch, 16]: packed; zeros leave the row to the head
    heat: torch.Tensor  # float32 [batch]: the temperature that the head draws with
    bias: torch.Tensor  # float32 [batch, vocabulary]
    marks: torch.Tensor  # int32 [batch, vocabulary]: seen, barred, times generated; counted on by the kernels
    logits: torch.Tensor  # float32 [batch, vocabulary]: the head's
    adjusted: torch.Tensor  # the same after bias and penalties
    parts: torch.Tensor  # float32 [batch, blocks, 4]
    counts: torch.Tensor  # int64 [batch, bins]
    masses: torch.Tensor  # int64 [batch, bins]
    listed: torch.Tensor  # int32 [batch]
    arrived: torch.Tensor  # int32 [batch]
    cuts: torch.Tensor  # int64 [batch, 4]
    candidates: torch.Tensor  # int64 [batch, 4096]
    bounds: torch.Tensor  # int64 [batch, 256]: what blocks of `two_pass_top` are sure of, a launch's number above
    launches: torch.Tensor  # int32 [batch]; the first counts those launches

    def first(self, batch: int) -> Sampling:
        return Sampling(*(getattr(self, field.name)[:batch] for field in fields(self)))

    def place(self, at: int, row: SampledRow) -> None:
        """Bias and marks of the new owner are set separately."""
        self.rows[at].copy_(torch.frombuffer(bytearray(row.packed()), dtype=torch.int32))
        self.heat[at].zero_()  # the head's draw would not count

    def leave(self, at: int, temperature: float) -> None:
        self.rows[at].zero_()
        self.heat[at].fill_(temperature)

    def set_bias(self, at: int, biases: Iterable[tuple[int, float]]) -> None:
        """Clears the bias of all other tokens."""
        write_bias(self.bias[at], biases)

    def set_marks(self, at: int, prompt: Sequence[int], output: Sequence[int], barred: Sequence[int]) -> None:
        write_marks(self.marks[at], prompt, output, barred)

    def rehearse(self) -> None:
        """torch loads a kernel at its first use, which takes milliseconds."""
        self.set_bias(0, ((0, 0.0),))
        self.set_marks(0, (0,), (0,), (0,))
        self.place(0, SampledRow(temperature=1.0, top_k=1))
        self.leave(0, 0.0)


def write_bias(table: torch.Tensor, biases: Iterable[tuple[int, float]]) -> None:
    """table [vocabulary] = the biases of the tokens named; 0 for all others."""
    pairs = list(biases)
    ids = torch.tensor([token for token, _ in pairs], dtype=torch.int64, device=table.device)
    values = torch.tensor([value for _, value in pairs], dtype=torch.float32, device=table.device)
    table.zero_().index_add_(0, ids, values)


def write_marks(table: torch.Tensor, prompt: Sequence[int], output: Sequence[int], barred: Sequence[int]) -> None:
    given, made, never = (torch.tensor(ids, dtype=torch.int64, device=table.device) for ids in (prompt, output, barred))
    table.zero_().index_add_(0, made, torch.ones_like(made, dtype=torch.int32))
    for ids, mark in ((given, SEEN), (made, SEEN), (never, BARRED)):
        table[ids] = table[ids] | mark


def blocks(vocabulary: int) -> int:
    return -(-vocabulary // (_THREADS * _EACH))


def allocate(batch: int, vocabulary: int, device: torch.device) -> Sampling:
    def zeros(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return Sampling(
        rows=zeros(batch, ROW_WORDS, dtype=torch.int32),
        heat=zeros(batch, dtype=torch.float32),
        bias=zeros(batch, vocabulary, dtype=torch.float32),
        marks=zeros(batch, vocabulary, dtype=torch.int32),
        logits=zeros(batch, vocabulary, dtype=torch.float32),
        adjusted=zeros(batch, vocabulary, dtype=torch.float32),
        parts=zeros(batch, blocks(vocabulary), 4, dtype=torch.float32),
        counts=zeros(batch, _BINS, dtype=torch.int64),
        masses=zeros(batch, _BINS, dtype=torch.int64),
        listed=zeros(batch, dtype=torch.int32),
        arrived=zeros(batch, dtype=torch.int32),
        cuts=zeros(batch, 4, dtype=torch.int64),
        candidates=zeros(batch, _LISTED, dtype=torch.int64),
        bounds=zeros(batch, _BOUNDS, dtype=torch.int64),
        launches=zeros(batch, dtype=torch.int32),
    )


def most_top(multiprocessors: int) -> int:
    """The top-k up to which `two_pass_top` gains: 1.5 tokens a block on average. Nearer to a token for each block the
    bound falls and the second pass grows without an end."""
    return multiprocessors * 10 // 13


def two_pass_top(
    library: Kernels, x: Normed, both: TwoPasses, state: Sampling, masks: torch.Tensor | None, places: RowPages
) -> Launch:
    """state.logits = those that `SampledRow.within_top` needs; for launches whose rows all are so, or idle."""
    values: dict[str, Argument] = {
        "rows": state.rows,
        "position": places.position,
        "masks": masks,
        "bounds": state.bounds,
        "bounds_stride": _BOUNDS,
        "launches": state.launches,
        "logits": state.logits,
    }
    if both.blocks > _BOUNDS:
        raise BuildError(f"{both.blocks} blocks share their bounds, room is for {_BOUNDS}")
    return two_pass_launch(library, "two_pass_top", x, both, values, OP_BLOCKS=both.blocks)


def sampling(library: Kernels, state: Sampling, choice: Choice, places: RowPages) -> tuple[Launch, ...]:
    """choice.best = the best token of each row that asks for it, its logits in state.logits; counts it in the marks."""
    batch, vocabulary = state.logits.shape
    shared, whole = Shape((blocks(vocabulary), batch, 1), _THREADS), Shape((batch, 1, 1), _THREADS)
    common: dict[str, Argument] = {
        "rows": state.rows,
        "position": places.position,
        "adjusted": state.adjusted,
        "parts": state.parts,
        "trigger": int(Trigger.AT_ENTRY),
    }
    histogram: dict[str, Argument] = {"counts": state.counts, "masses": state.masses}
    chosen: dict[str, Argument] = {"listed": state.listed, "best": choice.best}
    listed: dict[str, Argument] = {"list": state.candidates, "cuts": state.cuts, **chosen}
    given: dict[str, Argument] = {
        "logits": state.logits,
        "bias": state.bias,
        "marks": state.marks,
        "masks": choice.masks,
    }
    stages: tuple[tuple[str, Shape, dict[str, Argument]], ...] = (
        ("adjust", shared, {"arrived": state.arrived, **given, **histogram, **chosen}),
        ("bins", shared, {"arrived": state.arrived, "cuts": state.cuts, **histogram}),
        ("sift", shared, listed),
        ("draw", whole, {"marks": state.marks, **histogram, **listed}),
    )
    defines = {"OP_VOCABULARY": vocabulary}
    return tuple(
        prepare(library.kernel("sampling", entry, defines), shape, {**common, **more}) for entry, shape, more in stages
    )
