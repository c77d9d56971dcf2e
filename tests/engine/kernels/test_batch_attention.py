"""The wrapper of attention for many rows, and the division of its work as the reference has it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional

from engine.kernels import batch_attention as ops
from engine.kernels import reference
from engine.kernels.attention import Heads, LayerAttention
from engine.kernels.gpu import GpuShape

GPU = GpuShape(132, 227 << 10)


def made(library: Any, heads: Heads, rows: int, window: int | None = None) -> ops.BatchAttention:
    shape = ops.grid(heads, GPU)
    held = ops.workspace(heads, rows, shape, torch.device("cpu"))
    what = ops.BatchRows(torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, 8, dtype=torch.int32))
    return ops.BatchAttention(library, heads, what, shape, held, window)


@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("lengths", [[0, 0], [1], [0, 33, 0, 4000, 16, 17], [129] * 70])
def test_every_page_that_is_seen_is_read_once(lengths: list[int], window: int | None) -> None:
    each, entries, runs = reference.plan_rows(lengths, 2, 24, 4, window)
    assert len(runs) == 24
    read = []
    for entry, item, page, count in runs:
        at = (entry, item, page)
        for _ in range(count):
            read.append(at)
            entry, item, page = at
            if page + 1 < entries[entry][2]:
                at = (entry, item, page + 1)
            else:
                at = (entry, item + 1, 0) if item == 0 else (entry + 1, 0, 0)
    wanted = [(at, item, page) for at, one in enumerate(entries) for item in range(2) for page in range(one[2])]
    assert read == wanted
    assert all(first[3] >= second[3] for first, second in pairwise(runs))
    assert all(run[3] <= each for run in runs)
    for row, first, pages, length in entries:
        assert lengths[row] == length
        assert (first + pages - 1) * 16 < length <= (first + pages) * 16
        assert first * 16 <= max(0, length - (window or length)) < (first + 1) * 16


def test_a_long_head_has_fewer_runs() -> None:
    """Runs of a head meet in one warp: at one row as many pages are read as runs are merged, about."""
    for pages, each in ((12, 4), (64, 4), (128, 8), (512, 16), (2048, 32)):
        assert reference.plan_rows([16 * pages], 8, 1056, 4, None)[0] == max(each, -(-8 * pages // 1056))
    assert reference.plan_rows([16 * 64] * 64, 8, 1056, 4, None)[0] == 32  # all warps have work


def test_the_reference_agrees_with_torch() -> None:
    queries, pools = torch.randn(3, 4, 64).double(), torch.randn(2, 9, 2, 16, 64).double()
    pages, lengths = torch.randperm(9).view(3, 3), torch.tensor([20, 0, 48])
    found = reference.attend_rows(queries, (pools[0], pools[1]), pages, lengths, None)
    for row in (0, 2):
        keys, values = (
            pool[pages[row]].transpose(1, 2).reshape(-1, 2, 64)[: lengths[row]].transpose(0, 1)[None] for pool in pools
        )
        expected = functional.scaled_dot_product_attention(queries[row][None, :, None], keys, values, enable_gqa=True)
        torch.testing.assert_close(found[row], expected[0, :, 0])
    assert not found[1].any()


def test_a_layer_and_its_plan_have_one_window(recorder: Any) -> None:
    attention = made(recorder, Heads(4, 2, 64, False), 3, window=32)
    pool = torch.zeros(2, 4, 2, 16, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="window"):
        attention.attend(LayerAttention(pool[0], pool[1], None, None), torch.zeros(3, 4, 64), torch.zeros(3, 256))


def test_shared_memory_holds_the_rings() -> None:
    for dim in (64, 128, 192, 256):
        for shared in (99 << 10, 163 << 10, 227 << 10):
            heads = Heads(8, 2, dim, False)
            shape = ops.grid(heads, GpuShape(84, shared))
            assert 1 <= shape.warps <= 8
            assert shape.warps * shape.stages * ops.stage_bytes(heads, 2) <= shared


def test_layouts_that_are_not_served_are_named() -> None:
    assert ops.why_not(Heads(8, 2, 128, True)) is None
    assert "96" in str(ops.why_not(Heads(8, 2, 96, True)))
