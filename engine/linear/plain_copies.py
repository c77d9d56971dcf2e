"""Keeps plain copies of four- and eight-bit weights, while memory allows: of those that no kernel reads, for every
product; of the others for products with many rows, where arithmetic takes the time and a library's product is faster
than ours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from engine.kernels.weights import dequantize
from engine.linear import DenseLinear, Linear
from engine.linear.canonical import CanonicalLinear
from engine.linear.cuda import CudaLinear
from engine.linear.joined import JoinedLinear

OWN_ROWS = 192  # up to this many our own product is faster (docs/measurements/batches-gpu.md)
_SHARE = 1 / 3  # of free memory, at most
_UNREAD_SHARE = 2 / 3  # likewise, of weights that no kernel reads, whose products are slow without
_ROWS_AT_ONCE = 4096  # bounds what a copy takes on the way; a multiple of 8


@dataclass(frozen=True, slots=True)
class PlainCopies:
    """Both by identity: linears last as long as the model."""

    held: dict[int, DenseLinear] = field(default_factory=dict)  # for many rows
    unread: dict[int, DenseLinear] = field(default_factory=dict)  # for any number

    def of(self, linear: Linear, rows: int) -> Linear:
        """Whichever multiplies this number of rows faster."""
        found = self.unread if rows <= OWN_ROWS or id(linear) in self.unread else self.held
        return found.get(id(linear), linear)


def plain_copies(
    linears: Iterable[Linear], rows: int, free_bytes: int, dtype: torch.dtype = torch.bfloat16
) -> PlainCopies:
    """Copies have the `dtype` of activations."""
    linears = list(linears)
    unread = [linear for linear in linears if not _is_read(linear, dtype)]
    if sum(map(_plain_bytes, unread)) > _UNREAD_SHARE * free_bytes:
        return PlainCopies()
    found = PlainCopies(unread={id(linear): _copy(linear, dtype) for linear in unread})
    free_bytes -= sum(map(_plain_bytes, unread))
    wanted = [one for one in linears if isinstance(one, CudaLinear) and rows > OWN_ROWS and id(one) not in found.unread]
    if sum(map(_plain_bytes, wanted)) <= _SHARE * free_bytes:
        found.held.update((id(linear), _copy(linear, dtype)) for linear in wanted)
    torch.cuda.empty_cache()  # of what was on the way; it does nothing where there is no GPU
    return found


def _is_read(linear: Linear, dtype: torch.dtype) -> bool:
    """Whether products take the weights as they are."""
    if isinstance(linear, JoinedLinear):
        return all(_is_read(part, dtype) for part in linear.parts)
    if isinstance(linear, CudaLinear):
        return dtype != torch.float16
    return not isinstance(linear, CanonicalLinear)


def _plain_bytes(linear: Linear) -> int:
    if isinstance(linear, CudaLinear):
        return 2 * linear.matrix.rows * linear.matrix.columns
    if isinstance(linear, CanonicalLinear):
        rows, columns = linear.weight.shape
        return 2 * rows * columns
    return sum(map(_plain_bytes, linear.parts)) if isinstance(linear, JoinedLinear) else linear.nbytes


def _copy(linear: Linear, dtype: torch.dtype) -> DenseLinear:
    if isinstance(linear, CudaLinear):
        return _of_matrix(linear, dtype)
    if isinstance(linear, CanonicalLinear):
        return DenseLinear(linear.weight.dequantize(dtype), None if linear.bias is None else linear.bias.to(dtype))
    if isinstance(linear, JoinedLinear):
        parts = [_copy(part, dtype) for part in linear.parts]
        biases = [part.weight.new_zeros(part.weight.shape[0]) if part.bias is None else part.bias for part in parts]
        bias = None if all(part.bias is None for part in parts) else torch.cat(biases)
        return DenseLinear(torch.cat([part.weight for part in parts]), bias)
    if isinstance(linear, DenseLinear):
        return linear
    raise TypeError(f"no plain copy of {type(linear).__name__}")


def _of_matrix(linear: CudaLinear, dtype: torch.dtype) -> DenseLinear:
    matrix = linear.matrix
    weight = torch.empty(matrix.rows, matrix.columns, dtype=dtype, device=matrix.data.device)
    for first in range(0, 0 if weight.is_meta else matrix.rows, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, matrix.rows)
        weight[first:last] = dequantize(matrix, first, last, dtype)
    return DenseLinear(weight, None if linear.bias is None else linear.bias.to(dtype))
