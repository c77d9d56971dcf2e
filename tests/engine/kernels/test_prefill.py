"""How attention over chunks is spread over blocks, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.kernels import prefill as ops
from engine.kernels.attention import Heads, LayerAttention
from engine.kernels.gpu import GpuShape

CPU = torch.device("cpu")
GPUS = [GpuShape(132, 227 << 10, warpgroups=True), GpuShape(84, 99 << 10)]
SIZES = (16, 128, 512, 2048)


def attend(library: Any, layout: Heads, size: int, chunks: int, splits: ops.Splits) -> Any:
    pool = torch.zeros(2, 1, layout.keys, 16, layout.dim)
    where = ops.Chunks(torch.zeros(chunks, 4, dtype=torch.int32), torch.zeros(chunks, 8, dtype=torch.int32))
    queries = torch.zeros(size, layout.queries, layout.dim)
    layer = LayerAttention(pool[0], pool[1], None, None)
    return ops.attend_chunks(library, layout, where, splits, layer, queries, torch.zeros_like(queries))


@pytest.mark.parametrize("gpu", GPUS, ids=["warpgroups", "warps"])
@pytest.mark.parametrize("layout", [Heads(2, 1, 64, False), Heads(32, 8, 128, False)], ids=str)
def test_parts_have_room_whatever_a_pass_holds(recorder: Any, layout: Heads, gpu: GpuShape) -> None:
    splits = ops.splits_of(layout, SIZES, CPU, chunks=32, gpu=gpu)
    for size in SIZES:
        for chunks in (1, 32):
            grid = ops.attention_grid(layout, size, gpu, chunks)
            attend(recorder, layout, size, chunks, splits)
            assert size * grid.splits * layout.queries * layout.dim <= splits.out.numel()
            assert size * grid.splits * layout.queries * 2 <= splits.sums.numel()
            assert grid.tiles * layout.queries <= splits.arrivals.numel()
            # Were each chunk to begin a tile of its own, there would be blocks for all.
            assert grid.tiles * grid.queries >= size + (chunks - 1) * (grid.queries - 1)


@pytest.mark.parametrize(
    "layout", [Heads(2, 1, 64, False), Heads(16, 8, 128, False), Heads(32, 8, 128, False)], ids=str
)
def test_blocks_that_share_a_context_have_no_more_than_one_part_each(layout: Heads) -> None:
    """Of a pass of any number of tiles: whoever ends last puts the parts of its own tile together, and of no other."""
    for size in SIZES:
        for chunks in (1, 32):
            grid = ops.attention_grid(layout, size, GPUS[0], chunks)
            assert grid.blocks[0] <= GPUS[0].multiprocessors
            for tiles in range(1, grid.tiles + 1):
                parts = min(grid.splits, max(1, grid.most_blocks // (tiles * layout.queries)))  # as the kernel has it
                assert parts == 1 or tiles * parts * layout.queries <= grid.blocks[0]


def test_a_pass_without_room_for_its_parts_is_refused(recorder: Any) -> None:
    layout = Heads(2, 1, 64, False)
    splits = ops.splits_of(layout, (16,), CPU, gpu=GPUS[0])
    with pytest.raises(ValueError, match="no room"):
        attend(recorder, layout, 512, 1, splits)
