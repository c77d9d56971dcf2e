"""Wrapper of `plain_product`: a product of up to some hundred tokens with plain weights, gated or not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod

import torch

from engine.kernels import targets
from engine.kernels.build import Kernels
from engine.kernels.gpu import GpuShape
from engine.kernels.launch import Argument, Boxes, Launch, Shape, prepare
from engine.kernels.linear import CHAIN

# Beyond this many tokens a library's product is as fast or faster (docs/measurements/batches-gpu.md): tokens of any
# product, of one that is gated, of one that has more rows than columns and is not; and of a large matrix, not gated and
# gated.
MOST_TOKENS, _MOST_GATED, _MOST_WIDE = 384, 256, 128
_MOST_LARGE, _MOST_LARGE_GATED = 96, 128
_LARGE = 8 << 20  # more weights are
MOST_SLICES = 4
MOST_BLOCK_TOKENS = 128
TILES, PEERS = (16, 32, 48, 64, 96, 128), (2, 4)  # rows of a block, blocks of a cluster
_SPAN, _ROW_BYTES = 64, 128  # columns of a stage, and their bytes
_BARRIERS = 1 << 10  # bytes of shared memory beside the stages
_MOST_STAGES = 12
# What a block takes, µs on an H100, about (docs/measurements/batches-gpu.md): a token or row of a stage, copied; 64
# tokens by 64 rows of a stage, multiplied; a stage at least; beginning and end; and a byte of a slice's results until
# it is read again.
_COPIED, _MULTIPLIED, _STAGE, _ENDS, _SLICED = 0.0033, 0.164, 0.18, 1.1, 1.2e-6


@dataclass(frozen=True, slots=True)
class Division:
    tokens: int  # of a block
    tile: int  # rows of a block; half of them gates, where it is gated
    peers: int  # blocks of a cluster
    slices: int  # of the columns
    stages: int

    @property
    def room(self) -> int:
        return _ceil(self.tokens, 64) * 64

    @property
    def shared(self) -> int:
        return self.stages * (self.room + self.tile) * _ROW_BYTES

    def grid(self, tokens: int, rows: int) -> tuple[int, int, int]:
        """Tiles of rows, tiles of tokens, slices; no rows where a cluster would not be whole."""
        tiles = _ceil(rows, self.tile)
        return _ceil(tiles, self.peers) * self.peers, _ceil(tokens, self.tokens), self.slices

    def blocks(self, tokens: int, rows: int) -> int:
        return prod(self.grid(tokens, rows))


def division(tokens: int, columns: int, gpu: GpuShape, tile: int, peers: int, slices: int) -> Division:
    block = _ceil(_ceil(tokens, _ceil(tokens, MOST_BLOCK_TOKENS)), 8 * peers) * 8 * peers
    most = (gpu.shared - _BARRIERS) // ((_ceil(block, 64) * 64 + tile) * _ROW_BYTES)
    return Division(block, tile, peers, slices, min(_MOST_STAGES, _stages(columns, slices), most))


@cache
def divide(
    tokens: int, rows: int, columns: int, gpu: GpuShape, most_slices: int = MOST_SLICES, *, gated: bool = False
) -> Division | None:
    """Chooses the cheapest blocks that the GPU holds at a time, if any serve."""
    least = 2 if tokens > _MOST_WIDE and not gated else 1  # whole results take the library's time, too
    slices = range(least, (1 if gated else min(most_slices, MOST_SLICES, _ceil(columns, _SPAN))) + 1)
    tried = [division(tokens, columns, gpu, *one) for one in product(TILES, PEERS, slices)]
    fit = [one for one in tried if one.blocks(tokens, rows) <= _held(one.peers, gpu)]
    return min(fit, key=lambda one: _cost(one, tokens, rows, columns), default=None)


def _cost(how: Division, tokens: int, rows: int, columns: int) -> float:
    copied, multiplied = _COPIED * (how.tokens / how.peers + how.tile), _MULTIPLIED * how.room / 64 * how.tile / 64
    results = 0 if how.slices == 1 else how.slices * tokens * rows * 4
    return _ENDS + _stages(columns, how.slices) * max(copied, multiplied, _STAGE) + _SLICED * results


def _held(peers: int, gpu: GpuShape) -> int:
    """Clusters of four do not fill the GPU's groups of multiprocessors evenly."""
    return gpu.multiprocessors if peers == 2 else gpu.multiprocessors * 7 // 8


def why_not(weight: torch.Tensor, tokens: int, gpu: GpuShape, *, gated: bool = False) -> str | None:
    """Why the kernel cannot multiply this many tokens by weight bfloat16 [rows, columns], or None."""
    if (objection := targets.why_not("plain_product", gpu)) is not None:
        return objection
    rows, columns = weight.shape
    if weight.dtype != torch.bfloat16 or rows % (16 if gated else 8) or columns % 8 or columns < _SPAN:
        return (
            f"weights of {weight.dtype} and shape {tuple(weight.shape)} are not bfloat16 in runs of 16 bytes, 128 a row"
        )
    if tokens > _most_tokens(rows, columns, gated):
        return f"{tokens} tokens by {rows} · {columns} weights are too many"
    if divide(tokens, rows, columns, gpu, gated=gated) is None:
        return f"{tokens} tokens by {rows} rows are more than the GPU holds at a time"
    return None


def _most_tokens(rows: int, columns: int, gated: bool) -> int:
    if rows * columns > _LARGE:
        return _MOST_LARGE_GATED if gated else _MOST_LARGE
    if gated:
        return _MOST_GATED
    return _MOST_WIDE if rows >= columns else MOST_TOKENS


def plain_product(
    library: Kernels, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, how: Division, *, gated: bool = False
) -> Launch:
    """out = x · Wᵀ, bfloat16 [tokens, rows], or float32 [slices, tokens, rows] to be added up. `gated`: out bfloat16
    [tokens, rows / 2] = silu(x · Gᵀ) · (x · Uᵀ), weight [G; U]. x bfloat16 [tokens, columns]."""
    rows, columns = weight.shape
    tokens = x.shape[0]
    defines = {
        "OP_ROWS": rows,
        "OP_COLUMNS": columns,
        "OP_TOKENS": how.tokens,
        "OP_TILE": how.tile,
        "OP_PEERS": how.peers,
        "OP_STAGES": how.stages,
        "OP_GATED": int(gated),
        "OP_SLICES": int(how.slices > 1),
    }
    kernel = library.kernel("plain_product", "plain_product", defines, how.shared)
    shape = Shape(how.grid(tokens, rows), how.room * 2 + 32, how.shared)
    values: dict[str, Argument] = {
        "x": Boxes(x, how.tokens // how.peers),
        "weights": Boxes(weight, how.tile // 2 if gated else how.tile),
        "out": out,
        "tokens": tokens,
        **CHAIN,
    }
    return prepare(kernel, shape, values)


def _stages(columns: int, slices: int) -> int:
    return _ceil(_ceil(columns, _SPAN), slices)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
