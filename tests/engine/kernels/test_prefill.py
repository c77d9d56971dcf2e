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


def test_a_pass_without_room_for_its_parts_is_refused(recorder: Any) -> None:
    layout = Heads(2, 1, 64, False)
    splits = ops.splits_of(layout, (16,), CPU, gpu=GPUS[0])
    with pytest.raises(ValueError, match="no room"):
        attend(recorder, layout, 512, 1, splits)
