"""Multiplies by quantized weights in the form that checkpoints are decoded into, where no kernel does, and for exact
products."""

from __future__ import annotations

import torch

from quant.checkpoint.forms import Int4Groups, Int4Minima, Int8Rows

Narrow = Int4Groups | Int4Minima | Int8Rows

_ROWS_AT_ONCE = 1024  # bounds the plain copy


class CanonicalLinear:
    def __init__(self, weight: Narrow, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias  # float32 [rows]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.weight.shape[0]
        y = x.new_empty(x.shape[0], rows)
        for first in range(0, rows, _ROWS_AT_ONCE):
            last = min(first + _ROWS_AT_ONCE, rows)
            y[:, first:last] = x @ _rows(self.weight, first, last).dequantize(x.dtype).T
        return y if self.bias is None else y.add_(self.bias)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


def _rows(weight: Narrow, first: int, last: int) -> Narrow:
    if isinstance(weight, Int8Rows):
        return Int8Rows(weight.q[first:last], weight.scale[first:last])
    if isinstance(weight, Int4Minima):
        rows = slice(first, last)
        return Int4Minima(weight.packed[rows], weight.scale[rows], weight.minimum[rows], weight.group)
    return Int4Groups(weight.packed[first:last], weight.scale[first:last], weight.zero[first:last], weight.group)
