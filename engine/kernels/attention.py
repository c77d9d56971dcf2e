"""Wrapper of the decode attention kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.build import Kernels
from engine.kernels.gpu import LARGEST_SHARED
from engine.kernels.launch import Launch, Shape, prepare
from engine.kernels.linear import CHAIN

PAGE = 16
MAX_SHARED = 8  # query heads a block serves of one key-value head
SPLITS = 16  # of a context, at most
SINGLE_PAGES = 8  # a context of this many pages is not split
MIN_PAGES = 8  # of a split, of the longer ones
PAGES_AHEAD = 3  # of each warp, asked of L2 before they are read into registers
SLOTS = 2  # pages of each warp that are copied into shared memory ahead, of bfloat16; twice as many of fp8
RESULTS_BYTES = 48 << 10  # of shared memory, at most, in which the results of a block's warps meet
PAGE_PADDING = 128  # bytes that a page's keys have more in shared memory, and its values: `attention.cuh`'s runs
ASKED = 4  # splits that the merging block asks for at once
MANY_TOKENS = SPLITS * MIN_PAGES * PAGE  # a warp has several pages of a context beyond


@dataclass(frozen=True, slots=True)
class Heads:
    queries: int
    keys: int
    dim: int
    norm: bool  # queries and keys are normed

    @property
    def rows(self) -> int:
        return (self.queries + 2 * self.keys) * self.dim

    @property
    def subgroups(self) -> int:
        """Blocks that share a key-value head."""
        return -(-(self.queries // self.keys) // MAX_SHARED)

    def why_not(self) -> str | None:
        if self.dim % 32 or self.dim > 256:
            return f"heads of {self.dim}, the kernel knows multiples of 32 up to 256"
        return None


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Partial results of a row's and head's blocks, which the last one merges; shared by all layers."""

    out: torch.Tensor  # int64 [batch, splits, heads, dim]: a launch's number and a float32
    sums: torch.Tensor  # int64 [batch, splits, heads, 2]: the same of maximum and sum
    arrivals: torch.Tensor  # int32, zero between launches
    launches: torch.Tensor  # int32: how many launches merged splits

    def first(self, rows: int) -> SplitScratch:
        """The same memory for fewer rows."""
        each = self.arrivals.shape[0] // self.out.shape[0]
        return SplitScratch(
            self.out[:rows], self.sums[:rows], self.arrivals[: rows * each], self.launches[: rows * each]
        )


@dataclass(frozen=True, slots=True)
class RowPages:
    """Changed by the host and by `advance` alone."""

    position: torch.Tensor  # int32 [batch]: of the token being fed; -1 is an idle row
    pages: torch.Tensor  # int32 [batch, most pages of a row]; of rows that share a sequence, one line


@dataclass(frozen=True, slots=True)
class LayerAttention:
    keys: torch.Tensor  # bfloat16 [pages, kv_heads, 16, dim], or the bytes of float8_e4m3fn
    values: torch.Tensor
    query_gain: torch.Tensor | None  # float32 [dim]
    key_gain: torch.Tensor | None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    angles: torch.Tensor
    eps: float  # of the head norms


def scratch(heads: Heads, batch: int, device: torch.device) -> SplitScratch:
    counters = batch * heads.keys * heads.subgroups
    return SplitScratch(
        out=torch.zeros(batch, SPLITS, heads.queries, heads.dim, dtype=torch.int64, device=device),
        sums=torch.zeros(batch, SPLITS, heads.queries, 2, dtype=torch.int64, device=device),
        arrivals=torch.zeros(counters, dtype=torch.int32, device=device),
        launches=torch.zeros(counters, dtype=torch.int32, device=device),
    )


def most_splits(tokens: int) -> int:
    pages = -(-tokens // PAGE)
    return 1 if pages <= SINGLE_PAGES else min(SPLITS, -(-pages // MIN_PAGES))


def attention_defines(heads: Heads) -> dict[str, int]:
    served = -(-(heads.queries // heads.keys) // heads.subgroups)
    warps = 8 if served * heads.dim <= 1024 else 4  # results of all warps meet in RESULTS_BYTES
    return {
        "OP_Q_HEADS": heads.queries,
        "OP_KV_HEADS": heads.keys,
        "OP_SUBGROUPS": heads.subgroups,
        "OP_HEAD_DIM": heads.dim,
        "OP_QK_NORM": int(heads.norm),
        "OP_WARPS": warps,
        "OP_SPLITS": SPLITS,
        "OP_SINGLE_PAGES": SINGLE_PAGES,
        "OP_MIN_PAGES": MIN_PAGES,
        "OP_PAGES_AHEAD": PAGES_AHEAD,
        "OP_MIN_BLOCKS": 1,
        "OP_ASKED": ASKED,
    }


@dataclass(frozen=True, slots=True)
class AttentionOp:
    library: Kernels
    heads: Heads
    places: RowPages
    embedding: Embedding
    scratch: SplitScratch
    multiprocessors: int
    longest: int | None = None  # no row will hold more tokens
    bulk: bool = False  # whether the GPU has a copy engine, compute capability 9.0 and newer
    slots: int = SLOTS  # of bfloat16
    group: int = 1  # rows that are successive tokens of one sequence; it has one line of the page table
    resident: int = 1  # blocks on a multiprocessor, where they would be too many for one each
    most_shared: int = LARGEST_SHARED  # bytes that a block may ask for

    def prepare(self, layer: LayerAttention, qkv: torch.Tensor, out: torch.Tensor) -> Launch:
        """qkv float32 [batch, rows] → out bfloat16 [batch, heads · dim]; writes the new key and value to their page."""
        heads, batch = self.heads, qkv.shape[0]
        bytes_each = layer.keys.element_size()
        defines = attention_defines(heads) | {"OP_GROUP": self.group, "OP_KV_BYTES": bytes_each}
        values = {
            "qkv": qkv,
            "query_gain": layer.query_gain,
            "key_gain": layer.key_gain,
            "angles": self.embedding.angles,
            "position": self.places.position,
            "page_table": self.places.pages,
            "table_stride": self.places.pages.stride(0),
            "key_pool": layer.keys,
            "value_pool": layer.values,
            "split_out": self.scratch.out,
            "split_sums": self.scratch.sums,
            "arrivals": self.scratch.arrivals,
            "launches": self.scratch.launches,
            "out": out,
            "scale": heads.dim**-0.5 * 1.4426950408889634,  # exponents are of two
            "eps": self.embedding.eps,
            "window": layer.window or 0,
        }
        parts = SPLITS if self.longest is None else most_splits(self.longest)
        grid = (parts, heads.keys * heads.subgroups, batch)
        # A block may wait for the others of its row and head only where all blocks run at once.
        blocks = grid[0] * grid[1] * grid[2]
        resident = defines["OP_MIN_BLOCKS"] = self.resident if blocks > self.multiprocessors else 1
        defines["OP_POLL"] = int(blocks <= resident * self.multiprocessors)
        # Places in shared memory leave room for one block on a multiprocessor: else registers hold the pages.
        many = self.longest is None or self.longest > MANY_TOKENS
        slots = 2 * self.slots // bytes_each  # as many bytes are under way
        place = PAGE * heads.dim * bytes_each + PAGE_PADDING
        shared = slots * defines["OP_WARPS"] * 2 * place
        fits = shared + RESULTS_BYTES <= self.most_shared
        defines["OP_SLOTS"] = slots if self.bulk and many and fits and defines["OP_POLL"] and resident == 1 else 0
        shared = shared if defines["OP_SLOTS"] else 0
        kernel = self.library.kernel("attention", "attention", defines, shared)
        return prepare(kernel, Shape(grid, defines["OP_WARPS"] * 32, shared), {**values, **CHAIN})
