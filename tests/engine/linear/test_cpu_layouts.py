"""Torch's packed CPU kernels against the canonical weight in float32."""

from __future__ import annotations

import pytest
import torch

from engine.linear.cpu_layouts import Layout, dense_plan, pack_int4, pack_int8, why_not_int4, why_not_int8
from quant.checkpoint.nibbles import unpack_nibbles
from quant.checkpoint.rounding import round_rows
from quant.rounding import round_groups

pytestmark = pytest.mark.isa

# outputs, inputs, group: whole blocks, short last blocks, several chunks, groups that the kernel does not know
SHAPES = [(64, 256, 128), (16, 64, 32), (80, 128, 64), (112, 192, 96), (1040, 64, 64), (2064, 64, 32), (64, 512, 512)]


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_int4_weight_survives_packing(random, outputs, inputs, group):
    weight = round_groups(torch.randn(outputs, inputs, generator=random), group)
    packed = pack_int4(weight)
    assert why_not_int4(weight) is None
    assert packed.shape == weight.shape
    assert relative(packed.dequantize(torch.float32), weight.dequantize(torch.float32)) < 3e-3  # bfloat16 scales


@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_int4_products_agree(random, outputs, inputs, group):
    weight = round_groups(torch.randn(outputs, inputs, generator=random), group)
    packed, dense = pack_int4(weight), weight.dequantize(torch.float32)
    for rows in (1, 5):
        x = torch.randn(rows, inputs, generator=random).bfloat16()
        expected = x.float() @ dense.T
        assert relative(packed.matmul(x), expected) < 6e-3
        assert relative(packed.matmul_dense(x.float()), expected) < 4e-3
        assert relative(packed.matmul_dense(x), expected) < 8e-3


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_takes_less_than_a_third_of_bfloat16(group):
    packed = pack_int4(round_groups(torch.randn(256, 512), group))
    assert packed.nbytes <= 0.32 * 2 * 256 * 512


@pytest.mark.parametrize("outputs", [16, 48, 64, 80, 128, 160, 2048])
def test_the_layout_read_off_is_the_layout_used(random, outputs):
    q = torch.randint(0, 16, (outputs, 64), generator=random, dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    assert torch.equal(Layout.of(outputs).unpack(packed, 0, outputs).int().T, q)


def test_packing_by_chunks_is_packing_at_once(random):
    weight = round_groups(torch.randn(2064, 64, generator=random), 32)
    at_once = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack_nibbles(weight.packed).int(), 1)
    assert torch.equal(pack_int4(weight).packed, at_once)


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 256), (20, 64), (7, 32), (1500, 96)])
def test_int8_products_agree(random, outputs, inputs):
    weight = round_rows(torch.randn(outputs, inputs, generator=random))
    packed, dense = pack_int8(weight), weight.dequantize(torch.float32)
    assert why_not_int8(weight) is None
    assert packed.shape == weight.shape
    assert packed.nbytes < 0.6 * 2 * outputs * inputs
    for rows in (1, 5):
        x = torch.randn(rows, inputs, generator=random).bfloat16()
        expected = x.float() @ dense.T
        assert relative(packed.matmul(x), expected) < 4e-3
        assert relative(packed.matmul_dense(x.float()), expected) < 1e-5


def test_what_the_kernels_cannot_take_is_said():
    assert "multiple of 16" in str(why_not_int4(round_groups(torch.randn(24, 64), 32)))
    assert "groups of 16" in str(why_not_int4(round_groups(torch.randn(16, 64), 16)))
    assert "multiple of 32" in str(why_not_int8(round_rows(torch.randn(16, 40))))


@pytest.mark.parametrize(("bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_the_dense_type_is_the_one_with_instructions(bf16: bool, dtype: torch.dtype) -> None:
    plan = dense_plan(bf16)
    assert plan.dtype == dtype
    assert plan.int8_rows < plan.int4_rows
