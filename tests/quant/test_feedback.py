"""Rounding with feedback against a slow version of its own definition."""

from __future__ import annotations

import pytest
import torch

from quant.activations import Activations
from quant.errors import CannotQuantize
from quant.feedback import Feedback
from quant.rounding import LEVELS, encode_groups
from quant.search import Ranges, output_error, search_ranges

CPU = torch.device("cpu")


def seen(x: torch.Tensor, group: int) -> Activations:
    activations = Activations(x.shape[1], group, CPU)
    activations.add(x)
    return activations


def correlated(tokens: int, inputs: int, random: torch.Generator) -> torch.Tensor:
    mix = torch.randn(inputs, inputs, generator=random)
    return torch.randn(tokens, inputs, generator=random) @ mix / inputs**0.5


def slow(weight: torch.Tensor, ranges: Ranges, activations: Activations) -> torch.Tensor:
    """Column by column: round one, then move the rest to where the output error is least, by solving anew."""
    products = activations.products(0).double()
    diagonal = products.diagonal()
    order = diagonal.argsort(descending=True, stable=True).tolist()
    products = products + 0.1 * float(diagonal.mean()) * torch.eye(len(products), dtype=torch.float64)
    left = weight.double().clone()
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    for place, column in enumerate(order):
        scale, zero = ranges.scale[:, column // activations.group], ranges.zero[:, column // activations.group]
        code = ((left[:, column] / scale).round() + zero).clamp(0, LEVELS)
        codes[:, column] = code.to(torch.uint8)
        rest = order[place + 1 :]
        if rest:
            loss = left[:, column] - (code - zero) * scale
            # least squares: the rest of the columns take over what of the loss their inputs can express
            share = torch.linalg.solve(products[rest][:, rest], products[rest, column])
            left[:, rest] += loss.unsqueeze(1) * share
    return codes


def test_it_is_the_slow_version(random):
    x, weight = correlated(500, 32, random), torch.randn(24, 32, generator=random)
    activations = seen(x, 8)
    ranges = search_ranges(weight, activations)
    found = Feedback(activations).round(weight, ranges)
    codes = found.packed.unsqueeze(2).repeat(1, 1, 2)
    codes[..., 0] &= 15
    codes[..., 1] >>= 4
    same = codes.flatten(1) == slow(weight, ranges, activations)
    assert same.float().mean() > 0.99  # float32 against float64: a value at a tie may fall the other way


def test_the_output_errs_less_than_to_nearest(random):
    x, weight = correlated(1000, 256, random), torch.randn(64, 256, generator=random)
    activations = seen(x, 32)
    ranges = search_ranges(weight, activations)
    nearest = encode_groups(weight, ranges.scale, ranges.zero, 32).dequantize(torch.float32) - weight
    found = Feedback(activations).round(weight, ranges)
    better = found.dequantize(torch.float32) - weight
    assert output_error(better, activations) < 0.6 * output_error(nearest, activations)
    fresh = correlated(1000, 256, torch.Generator().manual_seed(11))  # the same mix, read again from its start
    assert (fresh @ better.T).square().mean() < 0.7 * (fresh @ nearest.T).square().mean()
    assert torch.equal(found.scale.float(), ranges.scale)
    assert torch.equal(found.zero.float(), ranges.zero)


def test_another_look_lessens_the_error_and_keeps_the_zero_points(random):
    x, weight = correlated(1000, 256, random), torch.randn(64, 256, generator=random)
    activations = seen(x, 32)
    feedback = Feedback(activations)
    once = feedback.round(weight, search_ranges(weight, activations))
    before = once.packed.clone(), once.scale.clone()
    twice = feedback.refine(weight, once)
    assert all(torch.equal(a, b) for a, b in zip(before, (once.packed, once.scale), strict=True))
    assert torch.equal(twice.zero, once.zero)
    errors = [output_error(one.dequantize(torch.float32) - weight, activations) for one in (once, twice)]
    assert errors[1] < 0.95 * errors[0]
    assert (twice.scale / once.scale - 1).abs().max() < 0.3


def test_no_scale_of_the_last_group_can_be_better(random):
    """The last group is looked at last: its scale, fitted to its values, is the best there is."""
    x, weight = correlated(300, 32, random), torch.randn(6, 32, generator=random)
    activations = seen(x, 16)
    feedback = Feedback(activations)
    found = feedback.refine(weight, feedback.round(weight, search_ranges(weight, activations)))
    products = activations.damped(0)

    def errors(values: torch.Tensor) -> torch.Tensor:
        delta = values.double() - weight
        return ((delta @ products) * delta).sum(1)

    own = found.dequantize(torch.float32)
    signed = own[:, 16:] / found.scale[:, 1:].float()
    for factor in (0.99, 0.999, 1.001, 1.01):
        other = own.clone()
        other[:, 16:] = signed * found.scale[:, 1:].float() * factor
        assert bool((errors(own) <= errors(other) * (1 + 1e-4)).all())


def test_a_group_of_zeros_keeps_its_scale():
    activations = seen(torch.eye(64), 32)
    weight = torch.zeros(4, 64)
    feedback = Feedback(activations)
    once = feedback.round(weight, search_ranges(weight, activations))
    twice = feedback.refine(weight, once)
    assert torch.equal(twice.packed, once.packed)
    assert torch.equal(twice.scale, once.scale)


def test_inputs_that_do_not_go_together_are_rounded_to_nearest(random):
    weight = torch.randn(16, 64, generator=random)
    activations = seen(torch.eye(64), 32)
    ranges = search_ranges(weight, activations)
    found = Feedback(activations).round(weight, ranges)
    assert torch.equal(found.packed, encode_groups(weight, ranges.scale, ranges.zero, 32).packed)


def test_inputs_never_seen_are_rounded_to_nearest(random):
    weight = torch.randn(16, 64, generator=random)
    activations = seen(torch.zeros(4, 64), 32)
    ranges = search_ranges(weight, activations)
    found = Feedback(activations).round(weight, ranges)
    assert torch.equal(found.packed, encode_groups(weight, ranges.scale, ranges.zero, 32).packed)


def test_inputs_beyond_float32_are_refused(random):
    weight = torch.randn(4, 32, generator=random)
    ranges = search_ranges(weight, seen(torch.randn(4, 32, generator=random), 32))
    with pytest.raises(CannotQuantize, match="beyond float32"):
        Feedback(seen(torch.full((4, 32), 1e30), 32)).round(weight, ranges)


def test_several_blocks_are_several_problems(random, monkeypatch):
    monkeypatch.setattr("quant.activations._WIDTH", 64)
    x, weight = correlated(400, 160, random), torch.randn(8, 160, generator=random)
    activations = seen(x, 32)
    assert len(activations.blocks) == 3
    whole = Feedback(activations).round(weight, search_ranges(weight, activations))
    for at, width in ((0, 64), (64, 64), (128, 32)):
        part = seen(x[:, at : at + width], 32)
        alone = Feedback(part).round(weight[:, at : at + width], search_ranges(weight[:, at : at + width], part))
        assert torch.equal(whole.packed[:, at // 2 : (at + width) // 2], alone.packed)
