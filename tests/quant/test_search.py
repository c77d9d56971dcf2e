"""The searches against brute force over the tokens themselves."""

from __future__ import annotations

import pytest
import torch

from quant.activations import Activations
from quant.fold import Fold
from quant.rounding import affine, encode_groups, round_groups
from quant.search import output_error, search_ranges, search_scale

CPU = torch.device("cpu")


def seen(x: torch.Tensor, group: int) -> Activations:
    activations = Activations(x.shape[1], group, CPU)
    for part in x.split(37):  # in uneven batches, as calibration does
        activations.add(part.unsqueeze(0))
    return activations


def true_error(delta: torch.Tensor, x: torch.Tensor) -> float:
    return float((x.double() @ delta.double().T).square().sum(1).mean())


def test_magnitude_and_products_are_means_over_tokens(random):
    x = torch.randn(100, 16, generator=random)
    activations = seen(x, 8)
    assert torch.allclose(activations.magnitude(), x.abs().mean(0), atol=1e-6)
    whole = x.T @ x / 100
    assert torch.allclose(activations.products(0), whole, atol=1e-5)
    groups = activations.group_products()
    assert groups.shape == (2, 8, 8)
    assert torch.allclose(groups[1], whole[8:, 8:], atol=1e-5)


def test_products_in_blocks(random, monkeypatch):
    monkeypatch.setattr("quant.activations._WIDTH", 16)
    x = torch.randn(50, 40, generator=random)
    activations = seen(x, 8)
    assert [block.stop - block.start for block in activations.blocks] == [16, 16, 8]
    whole = x.T @ x / 50
    assert torch.allclose(activations.products(2), whole[32:, 32:], atol=1e-5)
    assert torch.allclose(activations.group_products()[3], whole[24:32, 24:32], atol=1e-5)


def test_a_folded_scale_is_followed(random):
    x = torch.randn(60, 16, generator=random)
    columns = torch.rand(16, generator=random) + 0.5
    activations, expected = seen(x, 8), seen(x / columns, 8)
    activations.divide(columns)
    assert torch.allclose(activations.magnitude(), expected.magnitude(), atol=1e-6)
    assert torch.allclose(activations.products(0), expected.products(0), atol=1e-5)


def test_output_error_is_that_of_the_tokens(random):
    x = torch.randn(80, 24, generator=random)
    delta = torch.randn(7, 24, generator=random)
    assert output_error(delta, seen(x, 8)) == pytest.approx(true_error(delta, x), rel=1e-4)


def scaled_loss(weight: torch.Tensor, columns: torch.Tensor, x: torch.Tensor, group: int) -> float:
    """Over the tokens, group by group, of rounding weight * columns and dividing them out again."""
    delta = round_groups(weight * columns, group).dequantize(torch.float32) / columns - weight
    return sum(true_error(delta[:, at : at + group], x[:, at : at + group]) for at in range(0, weight.shape[1], group))


def test_channels_that_speak_loudly_are_protected(random):
    x = torch.randn(400, 64, generator=random)
    x[:, [3, 40]] *= 60
    weight = torch.randn(48, 64, generator=random)
    fold = Fold(("l",), "norm", 64)
    choice = search_scale([weight], fold, seen(x, 32))
    plain = scaled_loss(weight, torch.ones(64), x, 32)
    assert choice.alpha > 0
    assert choice.error == pytest.approx(scaled_loss(weight, choice.scale, x, 32), rel=1e-3)
    assert choice.error < 0.5 * plain


def test_the_choice_is_the_best_of_all_powers_and_never_worse_than_none(random):
    fold = Fold(("l", "m"), "norm", 32)
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(200, 32, generator=draw) * torch.rand(32, generator=draw) * 2
        weights = [torch.randn(16, 32, generator=draw), torch.randn(8, 32, generator=draw)]
        choice = search_scale(weights, fold, seen(x, 32))
        magnitude = x.abs().mean(0)
        losses = []
        for step in range(21):
            scale = magnitude ** (step / 20)
            scale /= (scale.max() * scale.min()).sqrt()
            losses.append(sum(scaled_loss(weight, scale, x, 32) for weight in weights))
        assert choice.error == pytest.approx(min(losses), rel=1e-3)
        assert choice.error <= losses[0] * 1.001


def test_equal_channels_are_left_alone(random):
    x = torch.randn(200, 32, generator=random).sign()
    choice = search_scale([torch.randn(16, 32, generator=random)], Fold(("l",), "norm", 32), seen(x, 32))
    assert choice.alpha == 0
    assert torch.equal(choice.scale, torch.ones(32))


def test_silent_channels_do_not_break_the_search(random):
    x = torch.randn(50, 32, generator=random)
    x[:, :8] = 0
    choice = search_scale([torch.randn(16, 32, generator=random)], Fold(("l",), "norm", 32), seen(x, 32))
    assert bool(torch.isfinite(choice.scale).all())
    assert bool((choice.scale > 0).all())
    nothing = search_scale([torch.randn(16, 32, generator=random)], Fold(("l",), "norm", 32), seen(x * 0, 32))
    assert nothing.alpha == 0


def test_ranges_are_the_best_cut_of_each_group(random):
    x = torch.randn(300, 32, generator=random)
    weight = torch.randn(600, 32, generator=random) ** 3  # heavy tails, more rows than one chunk
    ranges = search_ranges(weight, seen(x, 16))
    assert 0 < ranges.clipped < 1
    for row, group in ((0, 0), (1, 1), (511, 0), (512, 1), (599, 0)):
        part, inputs = weight[row : row + 1, group * 16 : group * 16 + 16], x[:, group * 16 : group * 16 + 16]

        def loss(scale: torch.Tensor, zero: torch.Tensor, part=part, inputs=inputs) -> float:
            return true_error(encode_groups(part, scale, zero, 16).dequantize(torch.float32) - part, inputs)

        low, high = part.amin(1, keepdim=True).clamp(max=0), part.amax(1, keepdim=True).clamp(min=0)
        cuts = [loss(*affine(low * (1 - 0.05 * step), high * (1 - 0.05 * step))) for step in range(9)]
        chosen = loss(ranges.scale[row, group].view(1, 1), ranges.zero[row, group].view(1, 1))
        assert chosen == pytest.approx(min(cuts), rel=1e-3)
