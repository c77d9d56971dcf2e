"""Wrapper of decode attention for many rows, whose keys and values are in their pages already.

`BatchAttention.plan` is enqueued once a step, after changes of lengths or pages, and `attend` once a layer: before its
wait it reads the plan, the page table and all pages but a row's last, so nothing between the two may change those.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.attention import PAGE, Heads, LayerAttention
from engine.kernels.build import Kernel, Kernels
from engine.kernels.gpu import GpuShape
from engine.kernels.launch import Argument, Launch, Shape, prepare
from engine.kernels.linear import CHAIN
from engine.kernels.weights import Format

MOST_ROWS = 1024
_GROUP = 8  # query heads that a warp serves of one key-value head
_WARPS, _STAGES = 8, 3  # of a block; pages in a warp's ring
_LEAST_PAGES = 4  # of a warp: fewer would be merged for longer than they are read
_MERGED = 2  # quarters of a page's reading that one more run of a head takes to merge
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class BatchRows:
    lengths: torch.Tensor  # int32 [rows]: tokens of the context, the newest included; 0 is a row that is left alone
    pages: torch.Tensor  # int32 [rows, most pages of a row]


@dataclass(frozen=True, slots=True)
class Workspace:
    each: torch.Tensor  # int32: pages of a run
    entries: torch.Tensor  # int32 [rows, 4]: row, first page seen, pages, tokens
    runs: torch.Tensor  # int32 [warps, 4]: entry, item, page, count
    out: torch.Tensor  # float32 [2 · warps, heads of an item, dim]
    sums: torch.Tensor  # float32 [2 · warps, heads of an item, 2]: maximum and sum of exponents
    arrivals: torch.Tensor  # int32 [warps], zero between launches


@dataclass(frozen=True, slots=True)
class Grid:
    blocks: int
    warps: int
    stages: int = _STAGES
    least: int = _LEAST_PAGES  # pages of a warp
    merged: int = _MERGED

    @property
    def units(self) -> int:
        return self.blocks * self.warps


def why_not(heads: Heads) -> str | None:
    if heads.dim % 64 or heads.dim > 256:
        return f"heads of {heads.dim}, the kernel for many rows knows multiples of 64 up to 256"
    return None


def grid(heads: Heads, gpu: GpuShape) -> Grid:
    """Gives a block as many warps as shared memory has rings for, of bfloat16 keys and values."""
    ring = _STAGES * stage_bytes(heads, torch.bfloat16.itemsize)
    warps = min(_WARPS, gpu.shared // ring)
    if warps < 1:
        raise ValueError(f"a ring takes {ring} bytes of shared memory, a block has {gpu.shared}")
    return Grid(gpu.multiprocessors, warps)


def stage_bytes(heads: Heads, each: int) -> int:
    """Size of a page's keys and values of one head."""
    return 2 * PAGE * heads.dim * each


def subgroups(heads: Heads) -> int:
    """Items that share a key-value head; each reads its pages."""
    return -(-(heads.queries // heads.keys) // _GROUP)


def workspace(heads: Heads, rows: int, shape: Grid, device: torch.device) -> Workspace:
    if rows > MOST_ROWS:
        raise ValueError(f"{rows} rows, a plan has {MOST_ROWS} at most")
    served = -(-(heads.queries // heads.keys) // subgroups(heads))

    def integers(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    return Workspace(
        each=integers(1),
        entries=integers(rows, 4),
        runs=integers(shape.units, 4),
        out=torch.zeros(2 * shape.units, served, heads.dim, dtype=torch.float32, device=device),
        sums=torch.zeros(2 * shape.units, served, 2, dtype=torch.float32, device=device),
        arrivals=integers(shape.units),
    )


@dataclass(frozen=True, slots=True)
class BatchAttention:
    library: Kernels
    heads: Heads
    rows: BatchRows
    grid: Grid
    workspace: Workspace
    window: int | None = None

    def plan(self) -> Launch:
        values: dict[str, Argument] = {
            "lengths": self.rows.lengths,
            "rows": self.rows.lengths.shape[0],
            "units": self.grid.units,
            "window": self.window or 0,
            "each": self.workspace.each,
            "entries": self.workspace.entries,
            "runs": self.workspace.runs,
        }
        return prepare(self._kernel("plan"), Shape((1, 1, 1), MOST_ROWS), values)

    def attend(
        self, layer: LayerAttention, queries: torch.Tensor, out: torch.Tensor, order: Format = Format.BF16
    ) -> Launch:
        """queries bfloat16, or float16 as pages then are, [rows, heads, dim] → out [rows, heads · dim], columns in the
        order named."""
        if layer.window != self.window:
            raise ValueError(f"a layer with window {layer.window} and a plan for {self.window}")
        held = self.workspace
        values: dict[str, Argument] = {
            "queries": queries,
            "key_pool": layer.keys,
            "value_pool": layer.values,
            "page_table": self.rows.pages,
            "table_stride": self.rows.pages.stride(0),
            "each": held.each,
            "entries": held.entries,
            "runs": held.runs,
            "outs": held.out,
            "sums": held.sums,
            "arrivals": held.arrivals,
            "out": out,
            "rows": queries.shape[0],
            "scale": self.heads.dim**-0.5 * LOG2_E,
            "window": self.window or 0,
        }
        each = layer.keys.element_size()
        shared = self.grid.warps * self.grid.stages * stage_bytes(self.heads, each)
        shape = Shape((self.grid.blocks, 1, 1), self.grid.warps * 32, shared)
        half = queries.dtype == torch.float16
        return prepare(self._kernel("attend", order, each, shared, half), shape, {**values, **CHAIN})

    def _kernel(
        self, entry: str, order: Format = Format.BF16, each: int = 2, shared: int = 0, half: bool = False
    ) -> Kernel:
        """`each`: bytes of a key's or value's number."""
        defines = {
            "OP_Q_HEADS": self.heads.queries,
            "OP_KV_HEADS": self.heads.keys,
            "OP_HEAD_DIM": self.heads.dim,
            "OP_WARPS": self.grid.warps,
            "OP_STAGES": self.grid.stages,
            "OP_LEAST": self.grid.least,
            "OP_MERGED": self.grid.merged,
            "OP_ORDER": int(order),
            "OP_KV_BYTES": each,
            "OP_F16": int(half),
        }
        return self.library.kernel("batch_attention", entry, defines, shared)
