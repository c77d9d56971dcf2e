"""Sums over ranks inside kernels."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import linear as ops
from engine.kernels import prefill
from engine.kernels.build import KernelLibrary
from engine.kernels.exchange import exchange_sum, sums_by_kernel
from engine.kernels.launch import Launcher
from engine.kernels.linear import Normed, ResidualUpdate
from engine.kernels.tiling import choose
from engine.kernels.weights import to_matrix
from quant.checkpoint.forms import Dense
from tests.engine.kernels.side_by_side import channels, side_by_side

pytestmark = pytest.mark.gpu

EPS = 1e-6
HIDDEN, COLUMNS = 256, 512  # so few blocks that the ranks run beside each other
ROUNDS = 50


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_product_of_parts_is_that_of_the_whole(
    library: KernelLibrary, launcher: Launcher, ranks: int, batch: int
) -> None:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    weights = [torch.randn(HIDDEN, COLUMNS, device="cuda").bfloat16() for _ in range(ranks)]
    matrices = [to_matrix(Dense(one)) for one in weights]
    how = choose(matrices[0], multiprocessors)
    each = channels(ranks, multiprocessors, 8 * 8 * how.block_tiles)
    gain = torch.rand(HIDDEN, device="cuda") + 0.5
    targets = [
        Normed(
            torch.zeros(batch, HIDDEN, device="cuda"),
            torch.zeros(batch, HIDDEN, device="cuda", dtype=torch.bfloat16),
            torch.zeros(batch, HIDDEN // 8, device="cuda"),
            EPS,
        )
        for _ in range(ranks)
    ]
    inputs = [torch.zeros(batch, COLUMNS, device="cuda", dtype=torch.bfloat16) for _ in range(ranks)]
    launches = [
        [ops.linear_residual(library, ResidualUpdate(x, target, gain), matrix, how, own)]
        for x, target, matrix, own in zip(inputs, targets, matrices, each, strict=True)
    ]
    for _ in range(ROUNDS):
        before = torch.randn(batch, HIDDEN, device="cuda")
        for target in targets:
            target.residual.copy_(before)
        for x in inputs:
            x.copy_(torch.randn(batch, COLUMNS, device="cuda"))
        side_by_side(launcher, launches, streams)
        found = sum(x.double() @ weight.double().T for x, weight in zip(inputs, weights, strict=True))
        torch.testing.assert_close(targets[0].residual.double(), before.double() + found, rtol=2e-5, atol=2e-3)
        for target in targets[1:]:
            assert torch.equal(target.residual, targets[0].residual)
            assert torch.equal(target.scaled, targets[0].scaled)
            assert torch.equal(target.squares, targets[0].squares)


@pytest.mark.parametrize("slices", [0, 3])
@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_a_norm_takes_the_products_of_all_ranks(
    library: KernelLibrary, launcher: Launcher, tokens: int, slices: int
) -> None:
    ranks = 2
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    each = channels(ranks, 40, prefill.norm_words(HIDDEN))
    gain = torch.rand(HIDDEN, device="cuda") + 0.5
    shape, kind = ((slices, tokens, HIDDEN), torch.float32) if slices else ((tokens, HIDDEN), torch.bfloat16)
    products = [torch.zeros(shape, dtype=kind, device="cuda") for _ in range(ranks)]
    held = [
        prefill.Stream(
            torch.zeros(tokens, HIDDEN, device="cuda"),
            torch.zeros(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16),
            EPS,
        )
        for _ in range(ranks)
    ]
    launches = [
        [prefill.add_norm(library, prefill.ProductParts(product), gain, one, own)]
        for product, one, own in zip(products, held, each, strict=True)
    ]
    for _ in range(ROUNDS):
        before = torch.randn(tokens, HIDDEN, device="cuda")
        for product, one in zip(products, held, strict=True):
            product.copy_(torch.randn(shape, device="cuda"))
            one.residual.copy_(before)
        side_by_side(launcher, launches, streams)
        parts = [one.sum(0) if slices else one for one in products]
        expected = before.double() + sum(one.bfloat16().double() for one in parts)
        torch.testing.assert_close(held[0].residual.double(), expected, rtol=1e-2 if slices else 1e-5, atol=2e-2)
        assert torch.equal(held[0].residual, held[1].residual)
        assert torch.equal(held[0].x, held[1].x)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 256, 4000])
def test_a_tensor_becomes_its_sum_over_all_ranks(
    library: KernelLibrary, launcher: Launcher, ranks: int, dtype: torch.dtype, size: int
) -> None:
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    each = channels(ranks, 40, 128)
    held = [torch.zeros(size, dtype=dtype, device="cuda") for _ in range(ranks)]
    assert sums_by_kernel(held[0], each[0])
    launches = [[exchange_sum(library, x, own)] for x, own in zip(held, each, strict=True)]
    for _ in range(ROUNDS):
        for x in held:
            x.copy_(torch.randn(size, device="cuda"))
        expected = sum(x.double() for x in held)
        side_by_side(launcher, launches, streams)
        assert torch.equal(held[0], held[1])
        torch.testing.assert_close(
            held[0].double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_value_looks_like_a_place_without_a_word(
    library: KernelLibrary, launcher: Launcher, dtype: torch.dtype
) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    held = [torch.ones(256, dtype=dtype, device="cuda") for _ in range(2)]
    held[0].view(torch.uint8)[:64] = 0xFF  # numbers of one of the many forms that are none
    launches = [[exchange_sum(library, x, own)] for x, own in zip(held, channels(2, 4, 128), strict=True)]
    side_by_side(launcher, launches, streams)
    none = 64 // held[0].element_size()
    for x in held:
        assert x[:none].isnan().all()
        assert (x[none:] == 2).all()
