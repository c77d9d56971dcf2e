"""The in-memory forms of a linear layer's weight. Every checkpoint format is decoded into one of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quant.checkpoint.nibbles import in_groups, unpack_nibbles

_ROWS_AT_ONCE = 1024  # bounds the float32 copy made while dequantizing


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """weight [N, K] in a float type."""

    weight: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Int4Groups:
    """weight[n, k] = (q[n, k] - zero[n, k // group]) * scale[n, k // group], with q and zero in 0..15.

    packed  uint8 [N, K/2], the even k in the low four bits
    scale   float [N, K/group], in the checkpoint's type
    zero    uint8 [N, K/group]
    """

    packed: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * 2

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes + self.zero.nbytes

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        def restore(grouped: torch.Tensor, rows: slice) -> None:
            grouped -= self.zero[rows].unsqueeze(2)
            grouped *= self.scale[rows].float().unsqueeze(2)

        return _dequantize(self.packed, self.group, dtype, restore)


@dataclass(frozen=True, slots=True, eq=False)
class Int4Minima:
    """Holds weight[n, k] = q[n, k] * scale[n, k // group] + minimum[n, k // group], with q in 0..15. The minimum is a
    real number, so Int4Groups, whose zero points are integers in 0..15, cannot represent these weights exactly.

    packed          uint8 [N, K/2], the even k in the low four bits
    scale, minimum  float [N, K/group], both in one type
    """

    packed: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * 2

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes + self.minimum.nbytes

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        def restore(grouped: torch.Tensor, rows: slice) -> None:
            grouped *= self.scale[rows].float().unsqueeze(2)
            grouped += self.minimum[rows].float().unsqueeze(2)

        return _dequantize(self.packed, self.group, dtype, restore)


def _dequantize(
    packed: torch.Tensor, group: int, dtype: torch.dtype, restore: Callable[[torch.Tensor, slice], None]
) -> torch.Tensor:
    """Unpacks four-bit numbers and converts them to weights. `restore` converts some rows at once, in place, in float32
    [rows, K/group, group], which bounds the float32 copy."""
    shape = packed.shape[0], packed.shape[1] * 2
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    for first in range(0, shape[0], _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        grouped = in_groups(unpack_nibbles(packed[rows]), group).float()
        restore(grouped, rows)
        out[rows] = grouped.flatten(1)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Int8Rows:
    """weight[n, k] = q[n, k] * scale[n]: q int8 [N, K], scale float32 [N]."""

    q: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.shape[0], self.q.shape[1]

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(self.shape, dtype=dtype, device=self.q.device)
        for first in range(0, self.shape[0], _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            out[rows] = self.q[rows].float().mul_(self.scale[rows].unsqueeze(1))
        return out


Weight = Dense | Int4Groups | Int4Minima | Int8Rows


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointLinear:
    """One linear layer as its checkpoint has it: y = x @ weight.T + bias, bias [N] or none."""

    weight: Weight
    bias: torch.Tensor | None = None


def stack_rows(weights: Sequence[Weight]) -> Weight | None:
    """One weight with the rows of all, in order (fused q, k, v or gate, up); None where their forms differ."""
    first = weights[0]
    if any(w.shape[1] != first.shape[1] for w in weights):
        return None
    if isinstance(first, Dense):
        dense = [w.weight for w in weights if isinstance(w, Dense) and w.weight.dtype == first.weight.dtype]
        return Dense(torch.cat(dense)) if len(dense) == len(weights) else None
    if isinstance(first, Int8Rows):
        rows = [w for w in weights if isinstance(w, Int8Rows)]
        if len(rows) < len(weights):
            return None
        return Int8Rows(torch.cat([w.q for w in rows]), torch.cat([w.scale for w in rows]))
    if isinstance(first, Int4Minima):
        return _stack_minima([w for w in weights if isinstance(w, Int4Minima)], len(weights))
    groups = [w for w in weights if isinstance(w, Int4Groups) and w.group == first.group]
    if len(groups) < len(weights) or any(w.scale.dtype != first.scale.dtype for w in groups):
        return None
    return Int4Groups(
        torch.cat([w.packed for w in groups]),
        torch.cat([w.scale for w in groups]),
        torch.cat([w.zero for w in groups]),
        first.group,
    )


def _stack_minima(weights: Sequence[Int4Minima], count: int) -> Int4Minima | None:
    first = weights[0]
    if len(weights) < count or any(w.group != first.group or w.scale.dtype != first.scale.dtype for w in weights):
        return None
    return Int4Minima(
        torch.cat([w.packed for w in weights]),
        torch.cat([w.scale for w in weights]),
        torch.cat([w.minimum for w in weights]),
        first.group,
    )
