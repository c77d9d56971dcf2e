"""Wrapper of the matrix kernels for many tokens: four- and eight-bit weights, read where decode steps read them.

`gemm.cu` serves every GPU and takes columns as they come. From 64 tokens on `gemm_wide.cu` serves GPUs of compute
capability 9.0; it wants its tokens laid out as `ordered` does it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.build import Kernels
from engine.kernels.gpu import GpuShape
from engine.kernels.launch import Argument, Launch, Shape, prepare
from engine.kernels.linear import CHAIN, weight_values
from engine.kernels.weights import Format, Matrix

BLOCK_ROWS = 128
TILES = (16, 32, 64, 128)  # tokens of a block
MOST_SLICES = 8
WIDE_TILES = (64, 128)  # of a warpgroup's products
_STAGES = 4
_MOST_STAGES = 8
_BARRIERS = 1024  # bytes of shared memory that a block of the wide kernel has beside its stages
_RAMP = 3  # stages that a block waits for its first operands and writes its results, about
_STAGE_BYTES = 6e6  # of results that memory takes or gives while blocks do a stage, about


@dataclass(frozen=True, slots=True)
class Division:
    """How a product is spread over blocks."""

    tokens: int  # of a block
    slices: int  # of the columns
    stages: int
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """What a product reads and leaves: x bfloat16 [tokens, columns]; out bfloat16 [tokens, rows], or float32 [slices,
    tokens, rows] to be added up where the division has several slices."""

    x: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None = None  # float32 [rows]; added where there is one slice, the reader's business otherwise


def why_not(matrix: Matrix) -> str | None:
    """Why the kernel cannot multiply by it, or None."""
    return "plain weights are torch's business" if matrix.format is Format.BF16 else None


def stage_bytes(matrix: Matrix, tokens: int, *, wide: bool = False) -> int:
    """Shared memory of a stage: 64 bytes of each row, scales, and the same columns of the tokens."""
    scales = 4 * BLOCK_ROWS * (matrix.format.span // matrix.group) if matrix.format is Format.INT4 else 0
    size = BLOCK_ROWS * 64 + scales + tokens * matrix.format.span * 2
    return _ceil(size, 1024) * 1024 if wide else size


def divide(matrix: Matrix, tokens: int, gpu: GpuShape, most_slices: int = MOST_SLICES) -> Division:
    """The division whose blocks, wave by wave, take the fewest stages."""
    tile = next((one for one in TILES if tokens <= one), TILES[-1])
    wide = gpu.warpgroups and tile in WIDE_TILES
    size = stage_bytes(matrix, tile, wide=wide)
    stages = min(_MOST_STAGES, (gpu.shared - _BARRIERS) // size) if wide else min(_STAGES, gpu.shared // size)
    if stages < 2:
        raise ValueError(f"two stages take {2 * size} bytes of shared memory, a block has {gpu.shared}")
    units = matrix.columns // matrix.format.span
    blocks = _ceil(tokens, tile) * _ceil(matrix.rows, BLOCK_ROWS)
    resident = gpu.multiprocessors * max(1, gpu.shared // (stages * size) if tile < 64 else 1)

    def cost(slices: int) -> float:
        # What several slices leave is wider, and read by whoever adds them up.
        moved = tokens * matrix.rows * 2 * (2 if slices == 1 else 4 * slices)
        return _ceil(blocks * slices, resident) * (_ceil(units, slices) + _RAMP) + moved / _STAGE_BYTES

    slices = min((n for n in range(1, min(most_slices, units) + 1)), key=lambda n: (cost(n), n))
    return Division(tile, slices, stages, wide)


def order(matrix: Matrix, how: Division) -> Format:
    """The layout that a product wants its tokens' columns in: a format's own, or plain, which BF16 stands for."""
    return matrix.format if how.wide else Format.BF16


def ordered(x: torch.Tensor, form: Format) -> torch.Tensor:
    """x [tokens, columns] laid out as `order.cuh` says, under the same shape; the same tensor where that is plain."""
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


def gemm(library: Kernels, matrix: Matrix, batch: Batch, how: Division) -> Launch:
    """batch.out = batch.x · Wᵀ (+ bias); batch.x laid out as `order` tells."""
    tokens = batch.x.shape[0]
    defines = {
        "OP_FORMAT": int(matrix.format),
        "OP_GROUP": matrix.group,
        "OP_TOKENS": how.tokens,
        "OP_STAGES": how.stages,
        "OP_SPLIT": int(how.slices > 1),
    }
    shared = how.stages * stage_bytes(matrix, how.tokens, wide=how.wide)
    grid = (_ceil(tokens, how.tokens), _ceil(matrix.rows, BLOCK_ROWS), how.slices)
    values: dict[str, Argument] = {
        "x": batch.x,
        "out": batch.out,
        "bias": batch.bias,
        "rows": matrix.rows,
        "columns": matrix.columns,
        "tokens": tokens,
        **weight_values(matrix),
        **CHAIN,
    }
    kernel = library.kernel("gemm_wide" if how.wide else "gemm", "gemm", defines, shared)
    return prepare(kernel, Shape(grid, 256, shared), values)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
