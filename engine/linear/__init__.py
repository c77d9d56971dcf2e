"""Multiplies by weights. The model calls a `Linear` and does not know its weight format.

Projections that read the same input are one linear: their weights are laid one under another, each written once into
its final place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from engine.linear.products import CpuProducts
from quant.checkpoint.source import TensorSource, finite


class Linear(Protocol):
    """Computes y = x · Wᵀ (+ b), for x [rows, in_features]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and dtype of weights, and on a CPU what multiplies those of fewer than 32 bits; None: torch, slowly."""

    dtype: torch.dtype
    device: torch.device
    products: CpuProducts | None = None

    @property
    def activations(self) -> Placement:
        """Float32 on a CPU whatever the weights are, so that the order of a sum never becomes a visible difference."""
        return Placement(torch.float32, self.device) if self.device.type == "cpu" else self

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        """In float32 on a CPU columns are contiguous: products with one row, and with eight, are then faster
        (docs/measurements/engine-cpu.md)."""
        if self.device.type == "cpu" and self.dtype == torch.float32:
            return torch.empty(columns, rows, dtype=self.dtype).t()
        return torch.empty(rows, columns, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Projection:
    prefixes: tuple[str, ...]
    out_features: tuple[int, ...]  # one a prefix
    in_features: int
    bias: bool = False


LinearLoader = Callable[[TensorSource, Projection, Placement], Linear]


class DenseLinear:
    """Weights [out, in]. `products`: how a CPU multiplies them if they have 16 bits."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, products: CpuProducts | None = None
    ) -> None:
        self.weight = weight
        self.bias = bias
        self._products = products if weight.dtype.itemsize == 2 and weight.device.type == "cpu" else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == self.weight.dtype:
            return functional.linear(x, self.weight, self.bias)
        if self._products is None:
            return functional.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        y = self._products.plain(x.float().contiguous(), self.weight)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


def load_dense(source: TensorSource, projection: Projection, placement: Placement) -> DenseLinear:
    rows = sum(projection.out_features)
    weight = placement.matrix(rows, projection.in_features)
    bias = torch.empty(rows, dtype=placement.dtype, device=placement.device) if projection.bias else None
    first = 0
    for prefix, count in zip(projection.prefixes, projection.out_features, strict=True):
        weight[first : first + count].copy_(finite(source.tensor(f"{prefix}.weight"), f"{prefix}.weight"))
        if bias is not None:
            bias[first : first + count].copy_(finite(source.tensor(f"{prefix}.bias"), f"{prefix}.bias"))
        first += count
    return DenseLinear(weight, bias, placement.products)
