"""Multiplies by four- and eight-bit weights on a CPU, in the layouts of `products.c`.

Activations stay float32: rounded to fewer bits, a difference in the last place between two ways of adding up would
become one of the activation's own last place, and an answer would depend on what runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.linear.products import CpuProducts
from quant.checkpoint.forms import Int4Groups, Int4Minima, Int8Rows
from quant.checkpoint.nibbles import unpack_nibbles

_BLOCKS_AT_ONCE = 8  # so that a byte a value stays in the processor's cache


@dataclass(frozen=True, slots=True, eq=False)
class Int4Cpu:
    """q uint8 [blocks, inputs, block / 2]: the first half of a block's outputs in the low halves of its bytes."""

    products: CpuProducts
    q: torch.Tensor
    scale: torch.Tensor  # [blocks, groups, block], in the checkpoint's type
    zero: torch.Tensor  # uint8 [blocks, groups, block]; or minima, in the type of the scale
    shape: tuple[int, int, int]  # outputs, inputs, inputs a group
    bias: torch.Tensor | None  # float32 [outputs]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.products.int4(x.float().contiguous(), self.q, self.scale, self.zero, self.shape)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)

    @property
    def nbytes(self) -> int:
        held = self.q.nbytes + self.scale.nbytes + self.zero.nbytes
        return held + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class Int8Cpu:
    products: CpuProducts
    q: torch.Tensor
    scale: torch.Tensor  # float32 [blocks · block]
    outputs: int
    bias: torch.Tensor | None  # float32 [outputs]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.products.int8(x.float().contiguous(), self.q, self.scale, self.outputs)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scale.nbytes + (0 if self.bias is None else self.bias.nbytes)


def pack_int4(weight: Int4Groups, bias: torch.Tensor | None, products: CpuProducts) -> Int4Cpu:
    return _pack_int4(weight, weight.zero, bias, products)


def pack_minima(weight: Int4Minima, bias: torch.Tensor | None, products: CpuProducts) -> Int4Cpu:
    return _pack_int4(weight, weight.minimum, bias, products)


def _pack_int4(
    weight: Int4Groups | Int4Minima, zero: torch.Tensor, bias: torch.Tensor | None, products: CpuProducts
) -> Int4Cpu:
    (outputs, inputs), size = weight.shape, products.block
    q = torch.zeros(-(-outputs // size), inputs, size // 2, dtype=torch.uint8)
    for block in range(0, len(q), _BLOCKS_AT_ONCE):
        values = _padded(unpack_nibbles(weight.packed[block * size : (block + _BLOCKS_AT_ONCE) * size]), size)
        low, high = values.view(-1, 2, size // 2, inputs).unbind(1)
        q[block : block + _BLOCKS_AT_ONCE] = (low | (high << 4)).transpose(1, 2)
    scale, zero = (
        _padded(part, size).view(len(q), size, -1).transpose(1, 2).contiguous() for part in (weight.scale, zero)
    )
    return Int4Cpu(products, q, scale, zero, (outputs, inputs, weight.group), bias)


def pack_int8(weight: Int8Rows, bias: torch.Tensor | None, products: CpuProducts) -> Int8Cpu:
    (outputs, inputs), size = weight.shape, products.block
    q = torch.zeros(-(-outputs // size), inputs, size, dtype=torch.int8)
    for block in range(0, len(q), _BLOCKS_AT_ONCE):
        values = _padded(weight.q[block * size : (block + _BLOCKS_AT_ONCE) * size], size)
        q[block : block + _BLOCKS_AT_ONCE] = values.view(-1, size, inputs).transpose(1, 2)
    return Int8Cpu(products, q, _padded(weight.scale.float().unsqueeze(1), size).flatten(), outputs, bias)


def _padded(values: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, n], with zeros below up to a whole block."""
    missing = -len(values) % size
    return torch.cat((values, values.new_zeros(missing, values.shape[1]))) if missing else values
