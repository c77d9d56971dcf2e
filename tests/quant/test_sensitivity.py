"""Which parts stay in eight bits: losses against what rounding really does, and plans against brute force."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.checkpoint.tensors import layer_linears
from quant.decoder import Decoder
from quant.errors import CannotQuantize
from quant.fold import folds
from quant.metrics import kl_divergence
from quant.rounding import round_groups
from quant.sensitivity import LayerPart, measure, plan, uniform
from tests.properties import example_count

LINEARS = ("a", "b", "c", "d")


def parts_of(losses: list[float], sizes: list[int]) -> list[LayerPart]:
    return [
        LayerPart(place, (LINEARS[place],), 64, sizes[place], {32: loss, 64: 2 * loss}, 0.0)
        for place, loss in enumerate(losses)
    ]


@pytest.fixture(scope="module")
def decoder(stored):
    """A small trained model."""
    return Decoder.open(stored / "bnb-int8-tiny")


def quiet(done: int, total: int) -> None:
    assert 0 < done <= total


def test_every_linear_is_in_one_part(decoder, reference):
    found = measure(decoder, reference["eval_ids"][:512].view(8, 64), (32, 64), quiet).parts
    assert [part.layer for part in found] == sorted(part.layer for part in found)
    for index in range(decoder.config.layers):
        named = [name for part in found if part.layer == index for name in part.linears]
        assert named == list(layer_linears(decoder.config))
    assert all(part.four.keys() == {32, 64} for part in found)
    assert all(0 < part.eight < 0.2 * min(part.four.values()) for part in found)
    assert sum(part.four[32] for part in found) < 0.9 * sum(part.four[64] for part in found)


@pytest.mark.product  # takes seconds
def test_the_losses_are_those_of_rounding(decoder, reference):
    """The sum of all, against the divergence of the model with every linear rounded: within a factor of two."""
    windows = reference["eval_ids"][:4096].view(32, 128).long()
    found = sum(part.four[64] for part in measure(decoder, windows, (64,), quiet).parts)
    judged = reference["eval_ids"][8192:9216].view(8, 128).long()
    with torch.inference_mode():
        x = changed = decoder.embed(judged)
        for index in range(decoder.config.layers):
            block, weights = decoder.block(index, 128), decoder.layer(index)
            rounded = {
                name: round_groups(tensor, 64).dequantize(torch.float32) if tensor.dim() == 2 else tensor
                for name, tensor in weights.items()
            }
            x, changed = block.forward(weights, x), block.forward(rounded, changed)
        logits = [decoder.logits(decoder.finish(one)).flatten(0, 1) for one in (x, changed)]
    true = float(kl_divergence(*logits).mean())
    assert 0.5 * true < found < 2 * true


def test_measuring_twice_gives_the_same(decoder, reference):
    windows = reference["eval_ids"][:256].view(4, 64)
    with torch.inference_mode():  # as the quantizer calls it
        first = measure(decoder, windows, (64,), quiet)
    again = measure(decoder, windows, (64,), quiet)
    assert first.parts == again.parts
    assert torch.equal(first.weights, again.weights)


def test_a_token_counts_as_much_as_the_gradient_there_is_long(decoder, reference, monkeypatch):
    """Against one pass backward through the whole model, in turns of two windows; without groups nothing is lost."""
    monkeypatch.setattr("quant.sensitivity._AT_ONCE", 64)
    monkeypatch.setattr("quant.sensitivity._PRECISION", "highest")
    windows = reference["eval_ids"][:128].view(4, 32)
    found = measure(decoder, windows, (), quiet)
    assert found.parts == ()
    assert found.weights.shape == (decoder.config.layers, len(folds(decoder.config)), *windows.shape)
    assert torch.allclose(found.weights.mean((2, 3)), torch.ones(1))
    for place, seen in enumerate(whole_pass(decoder, [windows[0::2], windows[1::2]])):
        layer, fold = divmod(place, len(folds(decoder.config)))
        expected = torch.empty(windows.shape)
        expected[0::2], expected[1::2] = seen
        assert torch.allclose(found.weights[layer, fold], expected / expected.mean(), rtol=1e-3)


def whole_pass(decoder, turns):
    """Lengths of gradients by layer and fold, for each of the turns."""
    random = torch.Generator().manual_seed(0)
    lengths = []
    for ids in turns:
        made = []
        x = decoder.embed(ids).requires_grad_()
        for index in range(decoder.config.layers):
            outputs = {}
            block, weights = decoder.block(index, ids.shape[1]), decoder.layer(index)
            x = block.forward(
                {name: tensor.clone() for name, tensor in weights.items()},
                x,
                None,
                lambda linear, _, output, outputs=outputs: outputs.update({linear: output}),
            )
            made += [[outputs[name] for name in fold.linears] for fold in folds(decoder.config)]
        logits = decoder.logits(decoder.finish(x))
        drawn = torch.stack([torch.multinomial(one.detach().softmax(1), 1, generator=random) for one in logits])
        loss = -logits.log_softmax(2).gather(2, drawn).sum()
        flat = [output for outputs in made for output in outputs]
        found = iter(torch.autograd.grad(loss, flat))
        lengths.append([sum(next(found).square().sum(2) for _ in outputs).sqrt() for outputs in made])
    return list(zip(*lengths, strict=True))


@settings(max_examples=example_count(100), deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.001, 10), st.sampled_from([64, 128, 640])), min_size=1, max_size=4),
    st.floats(4.3, 8.3),
)
def test_a_plan_keeps_to_its_budget_and_wastes_little(drawn, budget):
    parts = parts_of([loss for loss, _ in drawn], [size for _, size in drawn])
    weights = sum(part.weights for part in parts)
    try:
        found = plan(parts, budget, (64, 32))
    except CannotQuantize:
        assert all(parts[0].bits(group) / parts[0].weights > budget for group in (32, 64))
        return

    def outcome(group, eight):
        bits = sum(part.bits(None if part in eight else group) for part in parts)
        return bits / weights, sum(part.eight if part in eight else part.four[group] for part in parts)

    kept = [part for part in parts if part.layer in found.eight]
    bits, loss = outcome(found.group, kept)
    assert found.bits == pytest.approx(bits)
    assert bits <= budget * (1 + 1e-9)
    every = [
        outcome(group, eight)
        for group in (32, 64)
        for count in range(len(parts) + 1)
        for eight in combinations(parts, count)
    ]
    assert loss <= min(lost for spent, lost in every if spent <= budget) + sum(part.four[64] for part in parts) * 0.75


def test_the_part_that_loses_most_stays_in_eight_bits():
    parts = parts_of([0.1, 5.0, 0.1, 0.1], [640, 640, 640, 640])
    found = plan(parts, 5.6, (64,))
    assert found.eight == {1: ("b",)}
    assert found.mixed
    assert not uniform(64).mixed
    assert uniform(32).bits == 4.625


def test_inputs_that_no_group_divides_stay_in_eight_bits():
    odd = LayerPart(1, ("odd",), 72, 640, {}, 0.0)
    found = plan([*parts_of([9.0], [6400]), odd], 5, (64, 32))
    assert found.eight == {1: ("odd",)}
    with pytest.raises(CannotQuantize, match=r"a budget of 5 bits a weight: this model takes 8\.\d\d at least"):
        plan([odd], 5, (64, 32))


def test_a_budget_below_four_bits_is_refused():
    with pytest.raises(CannotQuantize, match=r"a budget of 4 bits a weight: this model takes 4\.31 at least"):
        plan(parts_of([1.0], [64]), 4, (64, 32))


def test_parts_are_the_folds(decoder):
    assert len(folds(decoder.config)) == 4
