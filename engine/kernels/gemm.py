"""Wrapper of the matrix kernel for many tokens: four- and eight-bit weights, read where decode steps read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.build import Kernels
from engine.kernels.launch import Argument, Launch, Shape, prepare
from engine.kernels.linear import CHAIN, weight_values
from engine.kernels.weights import Format, Matrix

BLOCK_ROWS = 128
TILES = (16, 32, 64, 128)  # tokens of a block
MOST_SLICES = 8
_STAGES = 4
_RAMP = 3  # stages that a block waits for its first operands and writes its results, about


@dataclass(frozen=True, slots=True)
class CardShape:
    """What a division depends on."""

    multiprocessors: int
    shared: int  # bytes of shared memory that a block may ask for


@dataclass(frozen=True, slots=True)
class Division:
    """How a product is spread over blocks."""

    tokens: int  # of a block
    slices: int  # of the columns
    stages: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What a product reads and leaves: x bfloat16 [tokens, columns]; out bfloat16 [tokens, rows], or float32 [slices,
    tokens, rows] to be added up where the division has several slices."""

    x: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None = None  # float32 [rows]; added where there is one slice, the reader's business otherwise


def card_shape(device: torch.device) -> CardShape:
    """Of a CUDA device."""
    found = torch.cuda.get_device_properties(device)
    return CardShape(found.multi_processor_count, found.shared_memory_per_block_optin)


def why_not(matrix: Matrix) -> str | None:
    """Why the kernel cannot multiply by it, or None."""
    return "plain weights are torch's business" if matrix.format is Format.BF16 else None


def stage_bytes(matrix: Matrix, tokens: int) -> int:
    """Shared memory of a stage: 64 bytes of each row, scales, and the same columns of the tokens."""
    scales = 4 * BLOCK_ROWS * (matrix.format.span // matrix.group) if matrix.format is Format.INT4 else 0
    return BLOCK_ROWS * 64 + scales + tokens * matrix.format.span * 2


def divide(matrix: Matrix, tokens: int, card: CardShape, most_slices: int = MOST_SLICES) -> Division:
    """The division whose blocks, wave by wave, take the fewest stages."""
    tile = next((one for one in TILES if tokens <= one), TILES[-1])
    size = stage_bytes(matrix, tile)
    stages = min(_STAGES, card.shared // size)
    if stages < 2:
        raise ValueError(f"two stages take {2 * size} bytes of shared memory, a block has {card.shared}")
    units = matrix.columns // matrix.format.span
    blocks = _ceil(tokens, tile) * _ceil(matrix.rows, BLOCK_ROWS)
    resident = card.multiprocessors * max(1, card.shared // (stages * size) if tile < 64 else 1)

    def cost(slices: int) -> int:
        # What several slices leave is read once more by whoever adds them up.
        return _ceil(blocks * slices, resident) * (_ceil(units, slices) + _RAMP) + (slices > 1)

    slices = min((n for n in range(1, min(most_slices, units) + 1)), key=lambda n: (cost(n), n))
    return Division(tile, slices, stages)


def gemm(library: Kernels, matrix: Matrix, batch: Batch, how: Division) -> Launch:
    """batch.out = batch.x · Wᵀ (+ bias)."""
    tokens = batch.x.shape[0]
    defines = {
        "OP_FORMAT": int(matrix.format),
        "OP_GROUP": matrix.group,
        "OP_TOKENS": how.tokens,
        "OP_STAGES": how.stages,
        "OP_SPLIT": int(how.slices > 1),
    }
    shared = how.stages * stage_bytes(matrix, how.tokens)
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
    kernel = library.kernel("gemm", "gemm", defines, shared)
    return prepare(kernel, Shape(grid, 256, shared), values)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
