"""Wrapper of the matrix kernels for many tokens: four- and eight-bit weights, in the layout that decode steps read.

`gemm.cu` serves every GPU and takes columns as they come. From 33 tokens on `gemm_wide.cu` serves GPUs of compute
capability 9.0; it wants its tokens laid out by `ordered`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch

from engine.kernels.build import Kernels
from engine.kernels.gpu import GpuShape
from engine.kernels.launch import Argument, Boxes, Launch, Shape, prepare
from engine.kernels.linear import CHAIN, weight_values
from engine.kernels.weights import INT4_SPAN, Format, Matrix, MatrixShape

BLOCK_ROWS = 128
BLOCKS = tuple((tokens, BLOCK_ROWS) for tokens in (16, 32, 64, 128))  # tokens and rows
MOST_SLICES = 8
_NARROW = 32  # tokens that are too few for the wide kernel
_THREADS, _WIDE_THREADS = 256, 384
_STAGES = 4
_MOST_STAGES = 8
_BARRIERS = 1024  # bytes of shared memory that a block of the wide kernel has beside its stages
_RAMP = 3  # stages that a block waits for its first operands and writes its results, about
_STAGE_BYTES = 6e6  # of results that memory takes or gives while blocks do a stage, about
# Of the wide kernel, µs on an H100, about (docs/measurements/batches-gpu.md):
_WIDE_STAGE = {  # of 128 rows, by tokens of a block
    Format.INT4: {64: 0.55, 96: 0.65, 128: 0.75, 160: 0.88, 192: 1.0},
    Format.INT8: {64: 0.42, 96: 0.44, 128: 0.46, 160: 0.5, 192: 0.56},
}
_WIDE_ROWS = {BLOCK_ROWS: 1.0, 2 * BLOCK_ROWS: 1.85}  # of a block; a stage's time by that of 128
_MOST_SUMS = 128 * 2 * BLOCK_ROWS  # of a block: what registers hold
WIDE_BLOCKS = tuple(  # as `BLOCKS`
    (tokens, rows) for tokens, rows in product(_WIDE_STAGE[Format.INT4], _WIDE_ROWS) if tokens * rows <= _MOST_SUMS
)
_WIDE_RAMP = 5  # as `_RAMP`
_WIDE_BYTES = 4e6  # as `_STAGE_BYTES`, a microsecond


@dataclass(frozen=True, slots=True)
class GemmDivision:
    tokens: int  # of a block
    rows: int  # of a block
    slices: int  # of the columns
    stages: int = 0
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """x bfloat16 [tokens, columns]; out bfloat16 [tokens, rows], or float32 [slices, tokens, rows] to be added up."""

    x: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None = None  # float32 [rows]; added where there is one slice, the reader's business otherwise


def why_not(matrix: Matrix) -> str | None:
    return "plain weights are torch's business" if matrix.format is Format.BF16 else None


def stage_bytes(matrix: MatrixShape, how: GemmDivision) -> int:
    """Shared memory of a stage: 64 bytes of each row, scales, and the same columns of the tokens."""
    scales = 4 * how.rows * (matrix.format.span // matrix.group) if matrix.format is Format.INT4 else 0
    return how.rows * 64 + scales + how.tokens * matrix.format.span * 2


def divide(matrix: Matrix, tokens: int, gpu: GpuShape, most_slices: int = MOST_SLICES) -> GemmDivision:
    return _divide(matrix.shape, tokens, gpu, most_slices)


@lru_cache(1024)  # eager has any number of tokens
def _divide(matrix: MatrixShape, tokens: int, gpu: GpuShape, most_slices: int) -> GemmDivision:
    slices = range(1, min(most_slices, matrix.columns // matrix.format.span) + 1)
    if gpu.warpgroups and tokens > _NARROW:
        every = [GemmDivision(*block, n, wide=True) for n in slices for block in WIDE_BLOCKS]
    else:
        block = next((one for one in BLOCKS if tokens <= one[0]), BLOCKS[-1])
        every = [GemmDivision(*block, n) for n in slices]
    how = min(every, key=lambda one: _cost(one, matrix, tokens, gpu))
    return with_stages(how, matrix, gpu)


def with_stages(how: GemmDivision, matrix: MatrixShape, gpu: GpuShape) -> GemmDivision:
    """Raises ValueError where a block has no room for two stages."""
    size = stage_bytes(matrix, how)
    stages = min(_MOST_STAGES, (gpu.shared - _BARRIERS) // size) if how.wide else min(_STAGES, gpu.shared // size)
    if stages < 2:
        raise ValueError(f"two stages take {2 * size} bytes of shared memory, a block has {gpu.shared}")
    return replace(how, stages=stages)


def _cost(how: GemmDivision, matrix: MatrixShape, tokens: int, gpu: GpuShape) -> float:
    """In stages, or in µs for the wide kernel. Sums of several slices are wider, and are read again."""
    moved = tokens * matrix.rows * 2 * (2 if how.slices == 1 else 4 * how.slices)
    blocks = _ceil(tokens, how.tokens) * _ceil(matrix.rows, how.rows) * how.slices
    stages = _ceil(matrix.columns // matrix.format.span, how.slices)
    if how.wide:
        stage = _WIDE_STAGE[matrix.format][how.tokens] * _WIDE_ROWS[how.rows]
        return _ceil(blocks, gpu.multiprocessors) * (stages * stage + _WIDE_RAMP) + moved / _WIDE_BYTES
    shared = with_stages(how, matrix, gpu).stages * stage_bytes(matrix, how)
    resident = gpu.multiprocessors * max(1, gpu.shared // shared if how.tokens < 64 else 1)
    return _ceil(blocks, resident) * (stages + _RAMP) + moved / _STAGE_BYTES


def order(matrix: Matrix, how: GemmDivision) -> Format:
    """The layout of a product's tokens' columns: a format's own, or BF16 for plain."""
    return matrix.format if how.wide else Format.BF16


def ordered(x: torch.Tensor, form: Format) -> torch.Tensor:
    """Lays x [tokens, columns] out as `order.cuh` defines; returns x itself where that is plain."""
    if form is Format.BF16:
        return x
    tokens = x.shape[0]
    products = 2 if form is Format.INT4 else 4
    # group of columns, lane, product, half, pair → product, half, lane, pair
    parts = x.view(x.shape[0], -1, 4, products, 2, 2).permute(0, 1, 3, 4, 2, 5)
    segments = parts.reshape(tokens, -1, 8, 8)  # run, segment
    own = torch.arange(8, device=x.device) ^ (torch.arange(tokens, device=x.device) % 8).unsqueeze(1)
    moved = segments.gather(2, own.view(tokens, 1, 8, 1).expand_as(segments))
    return moved.transpose(0, 1).reshape(x.shape)


def gemm(library: Kernels, matrix: Matrix, batch: Batch, how: GemmDivision) -> Launch:
    """Computes batch.out = batch.x · Wᵀ (+ bias); batch.x laid out as `order` returns."""
    tokens = batch.x.shape[0]
    defines = {
        "OP_FORMAT": int(matrix.format),
        "OP_GROUP": matrix.group,
        "OP_TOKENS": how.tokens,
        "OP_STAGES": how.stages,
        "OP_SPLIT": int(how.slices > 1),
    }
    if how.wide:
        defines["OP_ROWS"] = how.rows
    shared = how.stages * stage_bytes(matrix.shape, how)
    grid = (_ceil(tokens, how.tokens), _ceil(matrix.rows, how.rows), how.slices)
    values: dict[str, Argument] = {
        "x": batch.x,
        "out": batch.out,
        "bias": batch.bias,
        "rows": matrix.rows,
        "columns": matrix.columns,
        "tokens": tokens,
        **(weight_boxes(matrix, how.rows) if how.wide else weight_values(matrix)),
        **CHAIN,
    }
    kernel = library.kernel("gemm_wide" if how.wide else "gemm", "gemm", defines, shared)
    return prepare(kernel, Shape(grid, _WIDE_THREADS if how.wide else _THREADS, shared), values)


def weight_boxes(matrix: Matrix, rows: int) -> dict[str, Argument]:
    """Boxes of a stage of the wide kernel: 64 bytes of each row, or 512 of eight, and their scales."""
    if matrix.scales is None:
        weights = Boxes(matrix.data, rows, matrix.format.span, operand=False)
        return {"weights": weights, "scales": weights, "row_scale": matrix.row_scale}  # a map that is not looked at
    tiles = rows // 8
    words = 8 * matrix.format.span // matrix.group
    return {
        "weights": Boxes(matrix.data.flatten(1), tiles, INT4_SPAN, operand=False),
        "scales": Boxes(matrix.scales.flatten(1), tiles, words, operand=False),
        "row_scale": None,
    }


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
