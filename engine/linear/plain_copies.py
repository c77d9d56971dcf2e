"""Keeps plain copies of four- and eight-bit weights, while memory allows, for products with many rows, where arithmetic
takes the time and a library's product is faster than ours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from engine.kernels.weights import dequantize
from engine.linear import DenseLinear, Linear
from engine.linear.cuda import CudaLinear

OWN_ROWS = 192  # up to this many our own product is faster (docs/measurements/batches-gpu.md)
_SHARE = 1 / 3  # of free memory, at most
_ROWS_AT_ONCE = 4096  # bounds what a copy takes on the way; a multiple of 8


@dataclass(frozen=True, slots=True)
class PlainCopies:
    held: dict[int, DenseLinear] = field(default_factory=dict)  # by identity: linears last as long as the model

    def of(self, linear: Linear, rows: int) -> Linear:
        """Whichever multiplies this number of rows faster."""
        if isinstance(linear, CudaLinear) and rows > OWN_ROWS:
            return self.held.get(id(linear), linear)
        return linear


def plain_copies(linears: Iterable[Linear], rows: int, free_bytes: int) -> PlainCopies:
    wanted = [linear for linear in linears if isinstance(linear, CudaLinear) and rows > OWN_ROWS]
    if sum(2 * linear.matrix.rows * linear.matrix.columns for linear in wanted) > _SHARE * free_bytes:
        return PlainCopies()
    held = {id(linear): _copy(linear) for linear in wanted}
    torch.cuda.empty_cache()  # of what was on the way; it does nothing where there is no GPU
    return PlainCopies(held)


def _copy(linear: CudaLinear) -> DenseLinear:
    matrix = linear.matrix
    weight = torch.empty(matrix.rows, matrix.columns, dtype=torch.bfloat16, device=matrix.data.device)
    for first in range(0, 0 if weight.is_meta else matrix.rows, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, matrix.rows)
        weight[first:last] = dequantize(matrix, first, last, torch.bfloat16)
    return DenseLinear(weight, None if linear.bias is None else linear.bias.bfloat16())
