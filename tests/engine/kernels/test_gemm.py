"""How a product of many tokens is divided, and what its wrapper asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.gemm import (
    BLOCK_ROWS,
    BLOCKS,
    MOST_SLICES,
    WIDE_BLOCKS,
    Batch,
    GemmDivision,
    divide,
    gemm,
    ordered,
    stage_bytes,
    weight_boxes,
    why_not,
)
from engine.kernels.gpu import GpuShape
from engine.kernels.launch import Boxes
from engine.kernels.prefill import ProductParts
from engine.kernels.weights import Format, Matrix, to_matrix
from quant.checkpoint.forms import Int4Groups, Int8Rows

H100, SMALL = GpuShape(132, 227 << 10, True), GpuShape(28, 99 << 10)


def matrix(form: Format, rows: int, columns: int, group: int = 128) -> Matrix:
    return Matrix(form, rows, columns, torch.empty(0), group=group)


@given(
    form=st.sampled_from([Format.INT8, Format.INT4]),
    group=st.sampled_from([32, 64, 128]),
    rows=st.integers(1, 4000).map(lambda n: 8 * n),
    units=st.integers(1, 120),
    tokens=st.integers(1, 3000),
    gpu=st.sampled_from([H100, SMALL, GpuShape(108, 163 << 10)]),
)
def test_a_division_fits_the_card_and_leaves_no_slice_empty(
    form: Format, group: int, rows: int, units: int, tokens: int, gpu: GpuShape
) -> None:
    one = matrix(form, rows, units * form.span, group)
    how = divide(one, tokens, gpu)
    assert (how.tokens, how.rows) in (WIDE_BLOCKS if how.wide else BLOCKS)
    assert how.wide or how.tokens >= min(tokens, BLOCKS[-1][0])
    assert 1 <= how.slices <= min(MOST_SLICES, units)
    assert how.wide == (gpu is H100 and tokens > 32)
    assert how.stages >= (3 if how.wide else 2)
    stages = how.stages * stage_bytes(one.shape, how)
    assert stages <= gpu.shared
    # what is left of the stages at the end holds a tile of float32 results
    assert stages >= how.tokens * (how.rows + 4) * 4


def test_few_rows_are_sliced_so_that_every_multiprocessor_has_work() -> None:
    how = divide(matrix(Format.INT4, 4096, 14336), 128, H100)
    assert how.slices * (4096 // how.rows) >= 0.75 * H100.multiprocessors
    assert divide(matrix(Format.INT4, 28672, 4096), 512, H100).slices == 1


def test_a_block_has_more_rows_where_that_saves_a_wave() -> None:
    assert divide(matrix(Format.INT4, 28672, 4096), 128, H100).rows == 2 * BLOCK_ROWS
    assert divide(matrix(Format.INT4, 4096, 4096), 128, H100).rows == BLOCK_ROWS


@pytest.mark.parametrize(
    ("tokens", "tile"), [(33, 64), (64, 64), (90, 96), (128, 128), (150, 160), (192, 192), (256, 128)]
)
def test_a_tile_has_few_places_without_a_token(tokens: int, tile: int) -> None:
    assert divide(matrix(Format.INT4, 28672, 4096), tokens, H100).tokens == tile


@pytest.mark.parametrize("form", [Format.INT8, Format.INT4])
def test_the_order_of_columns_is_what_a_lane_of_the_kernel_expects(form: Format) -> None:
    x = torch.arange(11 * 256).view(11, 256)
    assert ordered(x, Format.BF16) is x
    laid = ordered(x, form)
    assert torch.equal(laid.flatten().sort().values, x.flatten())
    # runs of 64 columns apart, each token's 128 bytes with its segments permuted by the token
    runs = laid.view(4, 11, 8, 8)
    found = torch.empty(11, 4, 8, 8, dtype=torch.int64)
    for token in range(11):
        for segment in range(8):
            found[token, :, segment] = runs[:, token, segment ^ token % 8]
    found = found.view(11, 256) - 256 * torch.arange(11).unsqueeze(1)
    width, span = (8, 32) if form is Format.INT4 else (16, 64)  # columns that a lane has of a row at a time, of span
    for lane in range(4):
        for k in range(width // 4):  # its products of sixteen places: two pairs each
            for half in range(2):
                place = 16 * k + 8 * half + 2 * lane
                expected = width * lane + 4 * k + 2 * half
                for group in range(0, 256, span):
                    assert found[9, group + place : group + place + 2].tolist() == [
                        group + expected,
                        group + expected + 1,
                    ]


def test_a_card_with_too_little_shared_memory_is_told() -> None:
    with pytest.raises(ValueError, match="shared memory"):
        divide(matrix(Format.INT4, 4096, 4096), 128, GpuShape(10, 48 << 10))


def test_plain_weights_are_not_for_this_kernel() -> None:
    assert why_not(matrix(Format.BF16, 64, 64)) is not None
    assert why_not(matrix(Format.INT8, 64, 64)) is None


def test_the_grid_covers_tokens_rows_and_slices(recorder: Any) -> None:
    one = matrix(Format.INT4, 264, 512, 64)
    launch = gemm(
        recorder, one, Batch(torch.zeros(130, 512), torch.zeros(3, 130, 264)), GemmDivision(64, BLOCK_ROWS, 3, 4)
    )
    assert launch.shape.grid == (3, 3, 3)
    (asked,) = recorder.asked
    assert asked[2] == {"OP_FORMAT": 2, "OP_GROUP": 64, "OP_TOKENS": 64, "OP_STAGES": 4, "OP_SPLIT": 1}


@pytest.mark.parametrize("form", [Format.INT4, Format.INT8])
def test_the_wide_kernel_is_told_of_boxes(recorder: Any, form: Format) -> None:
    shapes = {
        Format.INT4: Int4Groups(
            torch.zeros(264, 256, dtype=torch.uint8),
            torch.ones(264, 8).half(),
            torch.zeros(264, 8, dtype=torch.uint8),
            64,
        ),
        Format.INT8: Int8Rows(torch.zeros(264, 512, dtype=torch.int8), torch.ones(264)),
    }
    one = to_matrix(shapes[form])
    how = GemmDivision(64, 256, 2, 6, wide=True)
    boxes = weight_boxes(one, how.rows)
    launch = gemm(recorder, one, Batch(torch.zeros(130, 512), torch.zeros(2, 130, 264)), how)
    assert launch.shape.grid == (3, 2, 2)
    (asked,) = recorder.asked
    assert asked[0] == "gemm_wide"
    assert asked[2]["OP_ROWS"] == 256
    weights, scales = boxes["weights"], boxes["scales"]
    assert isinstance(weights, Boxes)
    assert isinstance(scales, Boxes)
    assert weights.rows * weights.columns * weights.matrix.element_size() == 256 * 64
    if form is Format.INT4:  # of a stage: two groups of each row, a word each
        assert scales.rows * scales.columns == 256 * 2
        assert weights.matrix.shape == (33, 4 * 128)
    else:
        assert scales is weights


def test_a_product_in_bfloat16_cannot_want_its_bias_again() -> None:
    with pytest.raises(ValueError, match="bias"):
        ProductParts(torch.zeros(2, 2, dtype=torch.bfloat16), torch.zeros(2)).values()
    assert ProductParts(torch.zeros(3, 2, 2), torch.zeros(2)).values()["slices"] == 3
