"""Wrappers of `sample`, the choice by every parameter for many rows in one launch after each row's own best was found,
and of `fill`, which sets biases and marks. Order, ties, noise and so tokens are those of `engine.kernels.sampling`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels.build import Kernels
from engine.kernels.launch import Argument, Launch, Shape, prepare
from engine.kernels.linear import CHAIN
from engine.kernels.prefill import ProductParts

_THREADS = 512
_AHEAD = 6  # copies of 16 bytes that a thread has under way
_SHARE = 4096  # tokens of a block of `fill`


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    bias: torch.Tensor | None  # float32 [vocabulary], to be written
    marks: torch.Tensor | None  # int32 [vocabulary], likewise: seen, barred, times generated; counted on by `sample`
    given: Sequence[int] = ()  # ids of the prompt
    made: Sequence[int] = ()  # ids generated so far
    barred: Sequence[int] = ()
    biases: Sequence[tuple[int, float]] = ()

    @property
    def addresses(self) -> tuple[int, int]:
        """Biases and marks; 0 where there are none."""
        bias, marks = (0 if one is None else one.data_ptr() for one in (self.bias, self.marks))
        return bias, marks

    def words(self) -> list[int]:
        ids = [token for token, _ in self.biases]
        values = [value for _, value in self.biases]
        return [
            *struct.unpack("<4i", struct.pack("<2Q", *self.addresses)),
            *(len(kind) for kind in (self.given, self.made, self.barred, ids)),
            *self.given,
            *self.made,
            *self.barred,
            *ids,
            *struct.unpack(f"<{len(values)}i", struct.pack(f"<{len(values)}f", *values)),
        ]


def fill(library: Kernels, vocabulary: int, told: torch.Tensor, rows: int) -> Launch:
    """Fills the tables of `rows` rows. `told` int32: where the words of each row begin, then all words."""
    kernel = library.kernel("batch_sampling", "fill", _defines(vocabulary, torch.float32))
    return prepare(kernel, Shape((-(-vocabulary // _SHARE), rows, 1), _THREADS), {"told": told}).alone()


def sample(
    library: Kernels, rows: torch.Tensor, logits: ProductParts, position: torch.Tensor, best: torch.Tensor
) -> Launch:
    """best int64 [batch] = the best token of each row that asks, as a key whose lower half is the id's complement.
    rows int32 [batch, 16]: `SampledRow.packed`, zeros ask for nothing. Logits [batch, vocabulary] in one slice.
    `position` int32 [batch]: of the token being fed; -1 is an idle row."""
    data = logits.data
    if logits.bias is not None or data.shape[:-2].numel() != 1 or not data.is_contiguous():
        raise ValueError(f"logits lie in one slice without gaps and have their bias, not {tuple(data.shape)}")
    batch, vocabulary = data.shape[-2:]
    values: dict[str, Argument] = {"rows": rows, "position": position, "logits": data, "best": best}
    shared = _AHEAD * _THREADS * 16
    kernel = library.kernel("batch_sampling", "sample", _defines(vocabulary, data.dtype), shared)
    return prepare(kernel, Shape((batch, 1, 1), _THREADS, shared), {**values, **CHAIN})


def _defines(vocabulary: int, dtype: torch.dtype) -> dict[str, int]:
    return {"OP_VOCABULARY": vocabulary, "OP_FLOAT32": int(dtype == torch.float32), "OP_AHEAD": _AHEAD}
