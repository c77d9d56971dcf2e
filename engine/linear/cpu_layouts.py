"""Quantized weights in the layouts of torch's own CPU kernels, and when a dense product is quicker than those.

The kernels take bfloat16 activations; with other types they fall onto scalar code that is slower than no
quantization at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch

from quant.checkpoint.forms import Int4Groups, Int8Rows
from quant.checkpoint.nibbles import unpack_nibbles

_GROUPS: Final = (256, 128, 64, 32)  # what the int4 kernel takes
_ROWS_AT_ONCE: Final = 1024  # a multiple of every block that the int4 layout uses
_ROWS_PACKED: Final = 128  # likewise; fewer, so that four bytes a value stay in the processor's cache
_K_STEP: Final = 32  # the int8 kernel reads whole vectors: other widths crash it


@dataclass(frozen=True, slots=True, eq=False)
class CpuInt4:
    """packed: torch's int4 layout. scale_zero: bfloat16 [K/group, N, 2], weight = (q - 8) * scale + zero."""

    packed: torch.Tensor
    scale_zero: torch.Tensor
    group: int
    layout: Layout

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * 2

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale_zero.nbytes

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """bfloat16 [M, K] -> bfloat16 [M, N], for few rows."""
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, self.group, self.scale_zero)
        return y

    def matmul_dense(self, x: torch.Tensor) -> torch.Tensor:
        """[M, K] -> [M, N] in x's type, for many rows: dequantized a tile at a time, never whole."""
        outputs = self.shape[0]
        y = x.new_empty(x.shape[0], outputs)
        for first in range(0, outputs, _ROWS_AT_ONCE):
            last = min(first + _ROWS_AT_ONCE, outputs)
            torch.matmul(x, self.tile(first, last, x.dtype), out=y[:, first:last])
        return y

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return self.tile(0, self.shape[0], dtype).T.contiguous()

    def tile(self, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        """The transposed weight [K, last - first]; `first` and `last` fall on blocks."""
        q = self.layout.unpack(self.packed, first, last).float()
        scale, zero = self.scale_zero[:, first:last].float().unbind(2)
        q.view(-1, self.group, last - first).mul_(scale.unsqueeze(1)).add_((zero - 8 * scale).unsqueeze(1))
        return q.to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where torch's int4 layout keeps row n: blocks of rows, within a block [K, rows/2] bytes.

    The order differs from one instruction set to the next, so it is read off what torch does with known values.
    """

    block: int  # rows
    order: torch.Tensor  # int64 [block]: the row in each place, low halves first, then high halves
    tail: torch.Tensor  # the same for the rows after the last whole block, or empty

    @staticmethod
    def of(outputs: int) -> Layout:
        column = _places(torch.tensor([[0, 1]], dtype=torch.int32).expand(outputs, 2))
        runs = [len(list(run)) for _, run in groupby(column.tolist())][::2]  # block sizes, in order
        row = torch.zeros(2 * outputs, dtype=torch.int64)
        for shift in range(0, outputs.bit_length(), 4):
            digit = (torch.arange(outputs, dtype=torch.int32) >> shift) & 15
            row |= _places(digit.unsqueeze(1).expand(outputs, 2)).long() << shift
        block = runs[0]
        tail = row[2 * sum(runs[:-1]) :][: runs[-1]] if runs[-1] != block else row[:0]
        return Layout(block, _halves(row[:block]), _halves(tail - tail.min()) if len(tail) else tail)

    def unpack(self, packed: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """uint8 [K, last - first] of 0..15."""
        whole, rest = divmod(last - first, self.block)
        bytes_a_row = packed.shape[1]
        end = (first + whole * self.block) * bytes_a_row
        flat = packed.flatten()
        blocks = flat[first * bytes_a_row : end].view(whole, 2 * bytes_a_row, self.block // 2)
        parts = [self._rows(blocks, self.order)] if whole else []
        if rest:
            parts.append(self._rows(flat[end:].view(1, 2 * bytes_a_row, rest // 2), self.tail))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _rows(self, blocks: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """uint8 [B, K, R/2] -> uint8 [K, B * R]."""
        halves = torch.cat((blocks & 15, blocks >> 4), dim=2)
        if not torch.equal(order, torch.arange(len(order))):
            halves = halves[:, :, order.argsort()]
        return halves.transpose(0, 1).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class CpuInt8:
    """q: int8 [N, K] in rows. scale: bfloat16 [N]."""

    q: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.shape[0], self.q.shape[1]

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scale.nbytes

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """bfloat16 [M, K] -> bfloat16 [M, N], for few rows."""
        y: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, self.q, self.scale)
        return y

    def matmul_dense(self, x: torch.Tensor) -> torch.Tensor:
        """[M, K] -> [M, N] in x's type, for many rows: widened a tile at a time, never whole."""
        y = x.new_empty(x.shape[0], self.shape[0])
        for first in range(0, self.shape[0], _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            torch.matmul(x, self.q[rows].to(x.dtype).T, out=y[:, rows])
        return y.mul_(self.scale.to(x.dtype))


def why_not_int4(weight: Int4Groups) -> str | None:
    """Why torch's int4 CPU kernel cannot take this weight."""
    if weight.shape[0] % 16:
        return f"{weight.shape[0]} outputs are not a multiple of 16"
    if all(weight.group % size for size in _GROUPS):
        return f"groups of {weight.group} are not a multiple of 32"
    return None


def pack_int4(weight: Int4Groups) -> CpuInt4:
    """Groups that the kernel does not know are cut into ones that it does: a row's scale is then repeated."""
    outputs, inputs = weight.shape
    group = next(size for size in _GROUPS if weight.group % size == 0)
    packed = torch.empty(outputs, inputs // 2, dtype=torch.uint8)
    for first in range(0, outputs, _ROWS_PACKED):
        rows = slice(first, first + _ROWS_PACKED)
        values = unpack_nibbles(weight.packed[rows]).int()
        packed[rows] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    scale = weight.scale.float()
    both = torch.stack((scale, (8 - weight.zero.float()) * scale), dim=-1).to(torch.bfloat16)
    scale_zero = both.transpose(0, 1).repeat_interleave(weight.group // group, dim=0).contiguous()
    return CpuInt4(packed, scale_zero, group, Layout.of(outputs))


def why_not_int8(weight: Int8Rows) -> str | None:
    """Why torch's int8 CPU kernel cannot take this weight."""
    if weight.shape[1] % _K_STEP:
        return f"{weight.shape[1]} inputs are not a multiple of {_K_STEP}"
    return None


def pack_int8(weight: Int8Rows) -> CpuInt8:
    return CpuInt8(weight.q.contiguous(), weight.scale.to(torch.bfloat16))


@dataclass(frozen=True, slots=True)
class DensePlan:
    """From how many rows on `matmul_dense` is quicker than `matmul`, and in which type its activations should be."""

    dtype: torch.dtype
    int4_rows: int
    int8_rows: int


def dense_plan(bf16: bool) -> DensePlan:
    """`bf16`: whether the CPU has instructions for products of bfloat16; without, float32 is faster.

    The row counts were measured for weights of 1024 and 4096 squared on two cores of a CPU of either kind.
    """
    if bf16:
        return DensePlan(torch.bfloat16, int4_rows=96, int8_rows=16)
    return DensePlan(torch.float32, int4_rows=256, int8_rows=64)


def _places(values: torch.Tensor) -> torch.Tensor:
    """What lies in each four-bit place after torch packed int32 [N, 2]."""
    packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.contiguous(), 1)
    return unpack_nibbles(packed.flatten())


def _halves(order: torch.Tensor) -> torch.Tensor:
    return torch.cat((order[0::2], order[1::2]))
