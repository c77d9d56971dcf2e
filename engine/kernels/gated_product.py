"""Wrapper of `gated_product`: a product with plain gate and up rows and their gate in one kernel, for many tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels import targets
from engine.kernels.build import Kernels
from engine.kernels.gpu import GpuShape
from engine.kernels.launch import Argument, Boxes, Launch, Shape, prepare
from engine.kernels.linear import CHAIN

TILES = (256, 224, 192, 160, 128)  # rows of a block, half of them gates
_PEERS, _TOKENS, _THREADS = 2, 128, 288  # blocks of a cluster; tokens and threads of a block
_SPAN, _ROW_BYTES = 64, 128  # columns of a stage, and their bytes
_RESULTS, _BARRIERS = 32 << 10, 1 << 10  # bytes of shared memory beside the stages
_MOST_STAGES = 8
_ENDING = 600  # what a tile's results take, in rows of a stage's products
# Of the tiles of all waves: below, a library's product and a gate are faster (docs/measurements/batches-gpu.md).
_LEAST_USE = 0.75


@dataclass(frozen=True, slots=True)
class GatedDivision:
    tile: int  # rows of a block
    stages: int
    clusters: int
    use: float  # tokens and rows that there are, of those that all waves have room for

    @property
    def shared(self) -> int:
        return self.stages * _stage_bytes(self.tile) + _RESULTS


def divide(tokens: int, half: int, columns: int, gpu: GpuShape) -> GatedDivision:
    def cost(tile: int) -> int:
        return _waves(tile, tokens, half, gpu) * (_ceil(columns, _SPAN) * tile + _ENDING)

    return division(min(TILES, key=cost), tokens, half, gpu)


def division(tile: int, tokens: int, half: int, gpu: GpuShape) -> GatedDivision:
    stages = min(_MOST_STAGES, (gpu.shared - _BARRIERS - _RESULTS) // _stage_bytes(tile))
    clusters = gpu.multiprocessors // _PEERS
    room = _waves(tile, tokens, half, gpu) * clusters * _PEERS * _TOKENS * tile
    return GatedDivision(tile, stages, min(clusters, _tiles(tile, tokens, half)), tokens * 2 * half / room)


def _tiles(tile: int, tokens: int, half: int) -> int:
    return _ceil(tokens, _PEERS * _TOKENS) * _ceil(half, tile // 2)


def _waves(tile: int, tokens: int, half: int, gpu: GpuShape) -> int:
    return _ceil(_tiles(tile, tokens, half), gpu.multiprocessors // _PEERS)


def why_not(weight: torch.Tensor, tokens: int, gpu: GpuShape) -> str | None:
    """Why the kernel cannot multiply this many tokens by weight bfloat16 [2 · half, columns], or None."""
    if (objection := targets.why_not("gated_product", gpu)) is not None:
        return objection
    half, columns = weight.shape[0] // 2, weight.shape[1]
    if weight.dtype != torch.bfloat16 or half % 8 or columns % 8:
        return f"weights of {weight.dtype} and shape {tuple(weight.shape)} are not bfloat16 in runs of 16 bytes"
    use = divide(tokens, half, columns, gpu).use
    return f"{tokens} tokens fill {use:.2f} of its blocks" if use < _LEAST_USE else None


def gated_product(
    library: Kernels, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, how: GatedDivision | None = None
) -> Launch:
    """out bfloat16 [tokens, half] = silu(x · Gᵀ) · (x · Uᵀ); x bfloat16 [tokens, columns], weight bfloat16 [G; U]."""
    tokens, half = out.shape
    columns = x.shape[1]
    how = how or divide(tokens, half, columns, library.gpu)
    defines = {"OP_HALF": half, "OP_COLUMNS": columns, "OP_TILE": how.tile, "OP_STAGES": how.stages}
    kernel = library.kernel("gated_product", "gated_product", defines, how.shared)
    shape = Shape((_PEERS * how.clusters, 1, 1), _THREADS, how.shared)
    values: dict[str, Argument] = {
        "x": Boxes(x, _TOKENS),
        "weights": Boxes(weight, how.tile // 2),
        "out": out,
        "tokens": tokens,
        **CHAIN,
    }
    return prepare(kernel, shape, values)


def _stage_bytes(tile: int) -> int:
    return (_TOKENS + tile) * _ROW_BYTES


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
