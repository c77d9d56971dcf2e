"""Round to nearest: the error it may make, the scales it may choose, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.checkpoint.errors import NotFinite
from quant.checkpoint.rounding import round_rows
from quant.errors import CannotQuantize
from quant.rounding import affine, encode_groups, round_groups
from tests.properties import example_count

FLOATS = st.floats(-1000, 1000, width=32)


@settings(max_examples=example_count(150), deadline=None)
@given(st.lists(st.lists(FLOATS, min_size=16, max_size=16), min_size=1, max_size=4))
def test_four_bits_err_by_less_than_a_step(rows):
    weight = torch.tensor(rows)
    rounded = round_groups(weight, 8)
    scale = rounded.scale.float().repeat_interleave(8, 1)
    error = (rounded.dequantize(torch.float32) - weight).abs()
    # half a step, and at an end of the range half a step more: scale and zero point are rounded themselves,
    # the smallest scales to float16's own smallest step
    assert bool((error <= scale * 1.02 + 15 * 2.0**-25).all())
    assert int(rounded.zero.max()) <= 15
    assert bool((rounded.scale > 0).all())


@settings(max_examples=example_count(150), deadline=None)
@given(st.lists(st.lists(FLOATS, min_size=4, max_size=4), min_size=1, max_size=4))
def test_eight_bits_err_by_half_a_step(rows):
    weight = torch.tensor(rows)
    rounded = round_rows(weight)
    error = (rounded.dequantize(torch.float32) - weight).abs()
    assert bool((error <= rounded.scale.unsqueeze(1) * 0.5001).all())
    assert int(rounded.q.int().abs().max()) <= 127
    # the scale is the smallest bfloat16 number that reaches the row's largest magnitude
    largest = weight.abs().amax(1)
    assert torch.equal(rounded.scale.bfloat16().float(), rounded.scale)
    assert bool((rounded.scale * 127 >= largest * 0.999999).all())
    normal = largest > 1e-20
    assert bool((rounded.scale[normal] * 127 <= largest[normal] * 1.008).all())


def test_a_zero_point_between_two_numbers_is_the_nearest():
    """A range of fifteen steps of 1, wherever it begins: no value is further than half a step, its ends neither."""
    for low in torch.linspace(-15, 0, 151).tolist():
        weight = torch.linspace(low, low + 15, 64).unsqueeze(0)
        rounded = round_groups(weight, 64)
        assert float(rounded.scale) == pytest.approx(1, abs=1e-3)
        assert float((rounded.dequantize(torch.float32) - weight).abs().max()) < 0.51, low


def test_values_on_the_grid_come_back_exactly():
    scale, zero = torch.tensor([[0.25]]), torch.tensor([[5.0]])
    grid = ((torch.arange(16.0) - 5) * 0.25).unsqueeze(0)
    assert torch.equal(encode_groups(grid, scale, zero, 16).dequantize(torch.float32), grid)
    assert torch.equal(round_groups(grid, 16).dequantize(torch.float32), grid)


def test_a_row_of_zeros_stays_zero():
    assert not round_groups(torch.zeros(2, 8), 8).dequantize(torch.float32).any()
    assert not round_rows(torch.zeros(2, 8)).dequantize(torch.float32).any()


def test_every_scale_is_a_float16_number():
    scale, zero = affine(torch.tensor([[-0.123456, -1e-12, -3e6]]), torch.tensor([[0.7654321, 0.0, 3e6]]))
    assert torch.equal(scale, scale.half().float())
    assert bool(torch.isfinite(scale).all())
    assert bool((scale > 0).all())
    assert bool(((zero >= 0) & (zero <= 15)).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_damaged_weights_are_refused(bad):
    weight = torch.ones(2, 16)
    weight[1, 3] = bad
    with pytest.raises(NotFinite, match="NaN or infinity"):
        round_rows(weight)
    with pytest.raises(NotFinite, match="NaN or infinity"):
        round_groups(weight, 8)


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(CannotQuantize, match="groups of 32"):
        round_groups(torch.ones(2, 48), 32)
