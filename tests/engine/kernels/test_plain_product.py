"""How a product of few tokens is divided, and when it serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.gpu import GpuShape
from engine.kernels.plain_product import MOST_SLICES, TILES, divide, plain_product, why_not

H100, PCIE, OLDER = GpuShape(132, 227 << 10, True), GpuShape(114, 227 << 10, True), GpuShape(108, 163 << 10)


def weight(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(rows, columns, device="meta", dtype=dtype)


@pytest.mark.product
@given(
    tokens=st.integers(1, 384),
    rows=st.integers(1, 600).map(lambda n: 16 * n),
    columns=st.integers(1, 600).map(lambda n: 8 * n),
    gpu=st.sampled_from([H100, PCIE]),
    gated=st.booleans(),
)
def test_a_division_fits_the_card_and_has_a_place_for_every_result(
    tokens: int, rows: int, columns: int, gpu: GpuShape, gated: bool
) -> None:
    how = divide(tokens, rows, columns, gpu, gated=gated)
    if how is None:  # more than the largest tiles hold at a time, in two slices where they must be
        least = 2 if tokens > 128 and not gated else 1
        most = -(-rows // max(TILES)) * -(-tokens // 128) * least
        assert most > gpu.multiprocessors * 7 // 8 - 4 * 3 * 4 or columns <= 64
        return
    across, down, slices = how.grid(tokens, rows)
    assert across * how.tile >= rows
    assert across % how.peers == 0
    assert down * how.tokens >= tokens
    assert how.tokens % (8 * how.peers) == 0
    assert how.tokens <= how.room <= 128
    assert across * down * slices <= gpu.multiprocessors
    assert slices == how.slices <= (1 if gated else min(MOST_SLICES, -(-columns // 64)))
    assert how.slices > 1 or gated or tokens <= 128
    assert 1 <= how.stages <= -(-columns // 64)
    assert how.shared + 1024 <= gpu.shared


def test_no_more_slices_than_the_reader_takes() -> None:
    one = divide(64, 1024, 3072, H100, 1)
    several = divide(64, 1024, 3072, H100)
    assert one is not None
    assert several is not None
    assert one.slices == 1 < several.slices


@pytest.mark.parametrize(
    ("rows", "columns", "gated", "served"),
    [
        (4096, 1024, False, {1, 64, 96, 128}),
        (6144, 1024, True, {1, 64, 96, 128, 256}),
        (1024, 3072, False, {1, 64, 96, 128, 256, 384}),
        (16384, 2048, True, {1, 64, 96, 128}),
        (2048, 8192, False, {1, 64, 96}),
        (4096, 14336, False, {1, 64, 96}),
        (28672, 4096, True, set()),  # more rows than blocks that the GPU holds have
    ],
)
def test_few_tokens_are_served(rows: int, columns: int, gated: bool, served: set[int]) -> None:
    sizes = (1, 64, 96, 128, 256, 384, 512)
    assert {tokens for tokens in sizes if why_not(weight(rows, columns), tokens, H100, gated=gated) is None} == served


def test_what_it_cannot_do_is_said() -> None:
    assert "9.0" in str(why_not(weight(1024, 1024), 64, OLDER))
    assert "float16" in str(why_not(weight(1024, 1024, torch.float16), 64, H100))
    assert "(64, 56)" in str(why_not(weight(64, 56), 64, H100))
    assert "(1028, 1024)" in str(why_not(weight(1028, 1024), 64, H100))
    assert "(1032, 1024)" in str(why_not(weight(1032, 1024), 64, H100, gated=True))
    assert "too many" in str(why_not(weight(4096, 1024), 192, H100))
    assert why_not(weight(6144, 1024), 256, H100, gated=True) is None
    assert "too many" in str(why_not(weight(6144, 1024), 384, H100, gated=True))
    assert "too many" in str(why_not(weight(16384, 2048), 192, H100, gated=True))
    assert "at a time" in str(why_not(weight(16384, 512), 256, H100, gated=True))


@pytest.mark.parametrize("gated", [False, True])
def test_whole_clusters_are_launched(recorder: Any, gated: bool) -> None:
    recorder.gpu = H100
    how = divide(100, 6144, 1024, H100, gated=gated)
    assert how is not None
    x, out = (torch.empty(100, width, device="meta", dtype=torch.bfloat16) for width in (1024, 6144))
    launch = plain_product(recorder, x, weight(6144, 1024), out, how, gated=gated)
    assert launch.shape.grid == how.grid(100, 6144)
    assert launch.shape.grid[0] % how.peers == 0
    assert launch.shape.threads == 32 * (4 * 2 + 1)  # two warpgroups, and a warp that copies
    assert launch.values["tokens"] == 100
    ((_, _, defines, shared),) = recorder.asked
    assert (defines["OP_TOKENS"], defines["OP_GATED"], defines["OP_SLICES"]) == (how.tokens, int(gated), 0)
    assert shared == how.shared
