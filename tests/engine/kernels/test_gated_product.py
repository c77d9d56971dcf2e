"""How a product that gates its results is divided, and when it serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.gated_product import TILES, divide, gated_product, why_not
from engine.kernels.gpu import GpuShape

H100, PCIE, OLDER = GpuShape(132, 227 << 10, True), GpuShape(114, 227 << 10, True), GpuShape(108, 163 << 10)


def weight(half: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(2 * half, columns, device="meta", dtype=dtype)


@given(
    tokens=st.integers(1, 9000),
    half=st.integers(1, 4000).map(lambda n: 8 * n),
    columns=st.integers(1, 1000).map(lambda n: 8 * n),
    gpu=st.sampled_from([H100, PCIE]),
)
def test_a_division_fits_the_card_and_has_a_place_for_every_result(
    tokens: int, half: int, columns: int, gpu: GpuShape
) -> None:
    how = divide(tokens, half, columns, gpu)
    assert how.tile in TILES
    assert how.stages >= 4
    assert how.shared + 1024 <= gpu.shared
    assert 1 <= how.clusters <= gpu.multiprocessors // 2
    tiles = -(-tokens // 256) * -(-half // (how.tile // 2))
    assert how.clusters == min(tiles, gpu.multiprocessors // 2)
    assert 0 < how.use <= 1


@pytest.mark.parametrize(
    ("half", "columns", "served"),
    [(14336, 4096, {256, 512, 1024, 2048, 4096}), (3072, 1024, {512, 1024, 2048, 4096})],
    ids=["mistral", "qwen"],
)
def test_sizes_that_leave_a_quarter_of_the_blocks_in_vain_are_not_served(
    half: int, columns: int, served: set[int]
) -> None:
    sizes = (1, 192, 256, 384, 512, 1024, 2048, 4096)
    assert {tokens for tokens in sizes if why_not(weight(half, columns), tokens, H100) is None} == served


def test_what_it_cannot_do_is_said() -> None:
    assert "9.0" in str(why_not(weight(14336, 4096), 512, OLDER))
    assert "float16" in str(why_not(weight(14336, 4096, torch.float16), 512, H100))
    assert "(28680, 4096)" in str(why_not(weight(14340, 4096), 512, H100))
    assert "(28672, 4100)" in str(why_not(weight(14336, 4100), 512, H100))


def test_two_blocks_a_cluster_are_launched(recorder: Any) -> None:
    recorder.gpu = H100
    x, out = (torch.empty(300, width, device="meta", dtype=torch.bfloat16) for width in (4096, 14336))
    launch = gated_product(recorder, x, weight(14336, 4096), out)
    how = divide(300, 14336, 4096, H100)
    assert launch.shape.grid == (2 * how.clusters, 1, 1)
    assert launch.shape.shared == how.shared
    assert launch.values["tokens"] == 300
    ((_, _, defines, shared),) = recorder.asked
    assert defines == {"OP_HALF": 14336, "OP_COLUMNS": 4096, "OP_TILE": how.tile, "OP_STAGES": how.stages}
    assert shared == how.shared
