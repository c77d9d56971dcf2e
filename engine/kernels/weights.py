"""A matrix as the kernels read it: plain bf16, int8 with a scale a row, or four bits with scales and zero points.

bf16 and int8 stay as the checkpoint has them, [rows, columns]; four bits are laid out anew by `pack_int4`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from quant.checkpoint.forms import Dense, Int4Groups, Int8Rows
from quant.checkpoint.nibbles import unpack_nibbles

INT4_SPAN = 128  # columns that a lane quartet has of a row at a time
GROUPS = (32, 64, 128)
_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # of a word's eight columns


class Format(IntEnum):
    """Numbered as in `formats.cuh`."""

    BF16 = 0
    INT8 = 1
    INT4 = 2
    INT8_TILES = 3  # int8 as a warp reads it; `two_pass` alone makes it

    @property
    def span(self) -> int:
        """Columns of a chunk; a matrix has a whole number of chunks."""
        return (32, 64, INT4_SPAN, 64)[self]


@dataclass(frozen=True, slots=True)
class MatrixShape:
    format: Format
    rows: int
    columns: int
    group: int


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """weight [rows, columns] on the GPU."""

    format: Format
    rows: int
    columns: int
    data: torch.Tensor
    scales: torch.Tensor | None = None  # int4: [rows / 8, columns / group, 8] words
    row_scale: torch.Tensor | None = None  # int8: float32 [rows]
    group: int = 128

    @property
    def shape(self) -> MatrixShape:
        return MatrixShape(self.format, self.rows, self.columns, self.group)

    @property
    def nbytes(self) -> int:
        parts = [part for part in (self.data, self.scales, self.row_scale) if part is not None]
        return sum(part.nbytes for part in parts)


def why_not(weight: Dense | Int4Groups | Int8Rows) -> str | None:
    rows, columns = weight.shape
    if isinstance(weight, Dense) and weight.weight.dtype != torch.bfloat16:
        return f"weights are {weight.weight.dtype}, the kernels read bfloat16"
    if isinstance(weight, Int4Groups) and weight.group not in GROUPS and weight.group != columns:
        return f"groups of {weight.group}, the kernels know {GROUPS} and whole rows"
    span = 32 if isinstance(weight, Dense) else 64 if isinstance(weight, Int8Rows) else INT4_SPAN
    if columns % span:
        return f"{columns} columns are no multiple of {span}"
    if isinstance(weight, Int4Groups) and rows % 8:
        return f"{rows} rows are no multiple of 8"
    return None


def to_matrix(weight: Dense | Int4Groups | Int8Rows) -> Matrix:
    """Raises ValueError where `why_not` objects."""
    objection = why_not(weight)
    if objection is not None:
        raise ValueError(objection)
    rows, columns = weight.shape
    if isinstance(weight, Dense):
        return Matrix(Format.BF16, rows, columns, weight.weight.contiguous())
    if isinstance(weight, Int8Rows):
        return Matrix(Format.INT8, rows, columns, weight.q.contiguous(), row_scale=weight.scale.float().contiguous())
    return pack_int4(weight)


def pack_int4(weight: Int4Groups) -> Matrix:
    """Packs eight rows and 128 columns into 32 lanes × 4 words; word j of lane 4g + t has columns 32j + 8t + (0…7) of
    row g, even ones in its lower half, odd ones in its upper. A scale word is the float16 scale below and the bf16 of
    -(128 + zero) above."""
    rows, columns = weight.shape
    device = weight.packed.device
    data = torch.empty(rows // 8, columns // INT4_SPAN, 32, 4, dtype=torch.int32, device=device)
    if device.type == "meta":  # a shape alone
        group = weight.group if weight.group in GROUPS else INT4_SPAN
        scales = torch.empty(rows // 8, columns // group, 8, dtype=torch.int32, device=device)
        return Matrix(Format.INT4, rows, columns, data, scales=scales, group=group)
    shifts = torch.tensor(_SHIFTS, dtype=torch.int32, device=device)
    for first in range(0, rows, 2048):  # bounds the copy of four bytes a value
        values = unpack_nibbles(weight.packed[first : first + 2048]).to(torch.int32)
        # tile, row, unit, word, lane of the row, column → tile, unit, row, lane, word
        parts = values.view(-1, 8, columns // INT4_SPAN, 4, 4, 8).permute(0, 2, 1, 4, 3, 5)
        # Bits never meet, so the sum is their union; the top nibble wraps into the sign as it should.
        words = (parts << shifts).sum(-1, dtype=torch.int32)
        data[first // 8 : first // 8 + words.shape[0]] = words.view(-1, columns // INT4_SPAN, 32, 4)
    scale, zero, group = weight.scale, weight.zero, weight.group
    if group not in GROUPS:  # one group a row
        scale, zero = (part.repeat_interleave(columns // INT4_SPAN, 1) for part in (scale, zero))
        group = INT4_SPAN
    return Matrix(Format.INT4, rows, columns, data, scales=_scale_words(scale, zero), group=group)


def _scale_words(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """[rows, groups] each → int32 [rows / 8, groups, 8]."""
    low = scale.to(torch.float16).view(torch.int16).to(torch.int32) & 0xFFFF
    high = (-(128.0 + zero.float())).to(torch.bfloat16).view(torch.int16).to(torch.int32) << 16
    return (low | high).view(-1, 8, scale.shape[1]).transpose(1, 2).contiguous()


def dequantize(matrix: Matrix, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows first to last, plain [last - first, columns], of what `to_matrix` laid out; both fall on tiles of eight."""
    if matrix.format is Format.BF16:
        return matrix.data[first:last].to(dtype)
    if matrix.format is Format.INT8:
        if matrix.row_scale is None:
            raise ValueError("an int8 matrix without scales")
        return (matrix.data[first:last] * matrix.row_scale[first:last, None]).to(dtype)
    return _dequantize_int4(matrix, first // 8, last // 8).to(dtype)


def _dequantize_int4(matrix: Matrix, first: int, last: int) -> torch.Tensor:
    if matrix.scales is None:
        raise ValueError("an int4 matrix without scales")
    units, groups = matrix.columns // INT4_SPAN, matrix.columns // matrix.group
    # tile, unit, row, lane of the row, word → tile, row, unit, word, lane, column
    words = matrix.data[first:last].view(-1, units, 8, 4, 4).permute(0, 2, 1, 4, 3).unsqueeze(-1)
    shifts = torch.tensor(_SHIFTS, dtype=torch.int32, device=words.device)
    q = ((words >> shifts) & 15).reshape(-1, groups, matrix.group).float()
    scales = matrix.scales[first:last].transpose(1, 2).reshape(-1, groups)
    scale = (scales & 0xFFFF).to(torch.int16).view(torch.float16).float()
    offset = (scales >> 16).to(torch.int16).view(torch.bfloat16).float()  # -(128 + zero)
    return q.add_((offset + 128.0).unsqueeze(2)).mul_(scale.unsqueeze(2)).view(-1, matrix.columns)
