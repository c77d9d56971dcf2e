"""The canonical forms: what they weigh, how they dequantize, how rows are stacked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant.checkpoint.forms import Dense, Int4Groups, stack_rows
from quant.checkpoint.nibbles import pack_nibbles, unpack_nibbles
from quant.checkpoint.rounding import round_rows
from quant.rounding import round_groups


@given(st.lists(st.lists(st.integers(0, 15), min_size=6, max_size=6), min_size=1, max_size=5))
def test_nibbles_survive_packing(rows):
    values = torch.tensor(rows, dtype=torch.uint8)
    packed = pack_nibbles(values)
    assert packed.tolist() == [[row[i] + 16 * row[i + 1] for i in (0, 2, 4)] for row in rows]
    assert torch.equal(unpack_nibbles(packed), values)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_four_bits_take_less_than_a_third_of_bfloat16(group):
    weight = round_groups(torch.randn(256, 512), group)
    assert weight.nbytes <= 0.32 * 2 * 256 * 512
    assert weight.shape == (256, 512)


def test_dequantize_is_the_formula_in_every_type(random):
    q = torch.randint(0, 16, (3, 8), generator=random, dtype=torch.uint8)
    zero = torch.tensor([[0, 15], [7, 8], [3, 1]], dtype=torch.uint8)
    scale = torch.tensor([[0.5, 2.0], [-1.0, 0.25], [1.0, 3.0]]).half()
    weight = Int4Groups(pack_nibbles(q), scale, zero, 4)
    expected = [[(int(q[n, k]) - int(zero[n, k // 4])) * float(scale[n, k // 4]) for k in range(8)] for n in range(3)]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert weight.dequantize(dtype).dtype == dtype
        assert weight.dequantize(dtype).tolist() == torch.tensor(expected).to(dtype).tolist()


def test_more_rows_than_one_chunk(random):
    weight = torch.randn(2500, 32, generator=random)
    for rounded in (round_groups(weight, 32), round_rows(weight)):
        whole = rounded.dequantize(torch.float32)
        parts = [round_groups(weight[i : i + 1], 32) for i in (0, 1023, 1024, 2499)]
        if isinstance(rounded, Int4Groups):
            assert torch.equal(whole[[0, 1023, 1024, 2499]], torch.cat([p.dequantize(torch.float32) for p in parts]))
        assert (whole - weight).abs().max() < 0.5


def test_stacked_rows_are_the_rows_of_all(random):
    weights = [torch.randn(n, 64, generator=random) for n in (8, 3, 5)]
    for make in (lambda w: round_groups(w, 32), round_rows, Dense):
        parts = [make(w) for w in weights]
        stacked = stack_rows(parts)
        assert stacked is not None
        assert torch.equal(
            stacked.dequantize(torch.float32), torch.cat([part.dequantize(torch.float32) for part in parts])
        )


def test_unlike_forms_are_not_stacked(random):
    weight = torch.randn(8, 64, generator=random)
    a = round_groups(weight, 32)
    assert stack_rows([a, round_groups(weight, 64)]) is None
    assert stack_rows([a, round_rows(weight)]) is None
    assert stack_rows([round_rows(weight), a]) is None
    assert stack_rows([Dense(weight), a]) is None
    assert stack_rows([Dense(weight), Dense(weight.half())]) is None
    assert stack_rows([a, Int4Groups(a.packed, a.scale.float(), a.zero, 32)]) is None
    assert stack_rows([a, round_groups(weight[:, :32], 32)]) is None
