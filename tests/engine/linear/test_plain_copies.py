"""Plain copies of packed weights: when there are any, who uses them, and that they say the same."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from engine.kernels.gpu import GpuShape
from engine.kernels.weights import Format, dequantize, to_matrix
from engine.linear import DenseLinear, Linear
from engine.linear.canonical import CanonicalLinear
from engine.linear.chosen import ChosenProducts
from engine.linear.cuda import CudaLinear
from engine.linear.joined import JoinedLinear
from engine.linear.plain_copies import OWN_ROWS, PlainCopies, plain_copies
from engine.model.layers.products import Products
from quant.checkpoint.forms import Int4Groups, Int4Minima, Int8Rows

ROWS, COLUMNS = 512, 256
BYTES = 2 * ROWS * COLUMNS
PLENTY = 1 << 30


def linear(form: str, bias: bool = False) -> Linear:
    extra = torch.randn(ROWS) if bias else None
    if form == "bf16":
        return DenseLinear(torch.randn(ROWS, COLUMNS).bfloat16())
    if form == "int8":
        weight = torch.randint(-127, 128, (ROWS, COLUMNS), dtype=torch.int8)
        return CudaLinear(to_matrix(Int8Rows(weight, torch.rand(ROWS))), extra)
    groups = (ROWS, COLUMNS // 64)
    packed = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
    zeros = torch.randint(0, 16, groups, dtype=torch.uint8)
    return CudaLinear(to_matrix(Int4Groups(packed, torch.rand(groups).half(), zeros, 64)), extra)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_copy_multiplies_many_rows_as_the_packed_weights_would(form: str) -> None:
    packed = linear(form, bias=True)
    assert isinstance(packed, CudaLinear)
    copies = plain_copies([packed, linear("bf16")], 256, PLENTY)
    assert copies.of(packed, OWN_ROWS) is packed
    copy = copies.of(packed, OWN_ROWS + 1)
    assert isinstance(copy, DenseLinear)
    assert torch.equal(copy.weight, dequantize(packed.matrix, 0, ROWS, torch.bfloat16))
    x = torch.randn(3, COLUMNS).bfloat16()
    assert float((copy(x).float() - packed(x).float()).norm() / packed(x).float().norm()) < 1e-2


def test_there_is_none_for_few_rows_or_little_memory_or_plain_weights() -> None:
    packed, dense = linear("int4"), linear("bf16")
    assert plain_copies([packed], OWN_ROWS, PLENTY).held == {}
    assert len(plain_copies([packed, linear("int8")], OWN_ROWS + 1, PLENTY).held) == 2
    assert plain_copies([packed, packed], 256, 6 * BYTES - 1).held == {}
    assert len(plain_copies([packed, linear("int8")], 256, 6 * BYTES).held) == 2
    assert plain_copies([dense], 256, PLENTY).of(dense, 512) is dense


def test_weights_that_no_kernel_reads_have_a_copy_for_any_number_of_rows() -> None:
    """First of all, joined with others or not; of float16 the kernels read no packed weights."""
    groups = (ROWS, COLUMNS // 32)
    packed = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
    minima = CanonicalLinear(Int4Minima(packed, torch.rand(groups), -torch.rand(groups), 32), torch.randn(ROWS))
    joined = JoinedLinear((linear("bf16"), minima))
    read = linear("int4")
    x = torch.randn(3, COLUMNS).bfloat16()
    copies = plain_copies([minima, joined, read], 1, 10 * BYTES)
    for unread in (minima, joined):
        copy = copies.of(unread, 1)
        assert copy is copies.of(unread, 512)
        assert isinstance(copy, DenseLinear)
        exact = unread(x).float()
        assert float((copy(x).float() - exact).norm() / exact.norm()) < 1e-2
    assert copies.of(read, 1) is read
    assert plain_copies([minima, read], 1, BYTES) == PlainCopies()  # too little memory
    both = plain_copies([minima, read], 512, 4 * BYTES)
    assert isinstance(both.of(minima, 1), DenseLinear)
    assert isinstance(both.of(read, 512), DenseLinear)
    half = plain_copies([read], 1, PLENTY, torch.float16).of(read, 1)
    assert isinstance(half, DenseLinear)
    assert half.weight.dtype == torch.float16


def test_products_lay_their_tokens_out_for_whoever_multiplies() -> None:
    packed, nothing = linear("int4"), cast(Any, None)  # no kernel is launched
    for copies, wide in ((PlainCopies(), Format.INT4), (plain_copies([packed], 256, PLENTY), Format.BF16)):
        products = Products(nothing, nothing, GpuShape(132, 227 << 10, True), True, copies, ChosenProducts())
        assert products.order(packed, 256) is wide
        assert products.order(packed, 64) is Format.INT4
        if wide is Format.BF16:
            assert products.bytes_of(packed, 256) == 256 * ROWS * 2
            x = torch.randn(256, COLUMNS).bfloat16()
            found = products(packed, x, torch.empty(256 * ROWS * 2, dtype=torch.uint8))
            assert torch.equal(found.data, x @ copies.of(packed, 256).weight.t())  # type: ignore[attr-defined]
