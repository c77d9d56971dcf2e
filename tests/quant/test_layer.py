"""One layer: better than rounding to nearest in its own output, and never on the caller's tensors."""

from __future__ import annotations

import pytest
import torch

from quant.block import Block
from quant.checkpoint.config import parse_config
from quant.checkpoint.forms import Int8Rows
from quant.checkpoint.tensors import layer_linears, layer_norms
from quant.errors import CannotQuantize
from quant.layer import LayerCalibration
from quant.rotation import rotation
from quant.rounding import round_groups

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 10, "head_dim": 16}


@pytest.fixture(params=[("llama", 4), ("qwen2", 2), ("qwen3", 2)], ids=lambda p: p[0])
def layer(request, random):
    family, kv_heads = request.param
    printable = {"architectures": [f"{family.capitalize()}ForCausalLM"], "num_attention_heads": 4}
    config = parse_config({**printable, "num_key_value_heads": kv_heads, **SIZES}, "config.json")
    weights = {}
    for name, (inputs, outputs) in layer_linears(config).items():
        weights[f"{name}.weight"] = torch.randn(outputs, inputs, generator=random) / inputs**0.5
        if family == "qwen2":
            weights[f"{name}.bias"] = torch.randn(outputs, generator=random) * 0.1
    for name, size in layer_norms(config).items():
        weights[f"{name}.weight"] = torch.rand(size, generator=random) * 2 + 0.1
    block = Block(config, None, rotation(config.rope, 32, CPU))
    loud = torch.ones(64)
    loud[[5, 23]] = 12.0
    mix = torch.randn(64, 64, generator=random) / 8
    x = torch.randn(16, 32, 64, generator=random) @ mix * loud
    return block, weights, x


def quantized(block, weights, x, group=32, eight=(), counts=None):
    calibration = LayerCalibration(block, group, eight, CPU, counts)
    block.forward(weights, x, None, calibration.observing(slice(None)))
    return calibration.quantize(weights)


def test_the_output_errs_less_than_rounded_to_nearest(layer):
    block, weights, x = layer
    before = {name: tensor.clone() for name, tensor in weights.items()}
    result = quantized(block, weights, x[:12])
    assert all(torch.equal(weights[name], before[name]) for name in before)
    assert weights.keys() == before.keys()
    nearest = {
        name: round_groups(tensor, 32).dequantize(torch.float32) if tensor.dim() == 2 else tensor
        for name, tensor in weights.items()
    }

    def error(changed, inputs):
        return float((block.forward(changed, inputs) - block.forward(weights, inputs)).norm())

    assert error(result.weights(), x[:12]) < 0.85 * error(nearest, x[:12])
    assert error(result.weights(), x[12:]) < 0.95 * error(nearest, x[12:])  # text it was not calibrated on


def test_losses_name_every_linear_and_fall(layer):
    block, weights, x = layer
    result = quantized(block, weights, x)
    assert [loss.name for loss in result.losses] == list(layer_linears(block.config))
    assert set(result.quantized) == set(layer_linears(block.config))
    assert all(0 < loss.error < loss.nearest for loss in result.losses)
    assert any(loss.alpha > 0 for loss in result.losses)  # two inputs are loud
    assert not any(name.endswith("proj.weight") for name in result.dense)
    again = quantized(block, weights, x)
    assert all(torch.equal(weight.packed, result.quantized[name].packed) for name, weight in again.quantized.items())


def test_tokens_that_do_not_count_change_nothing(layer):
    block, weights, x = layer
    counts = torch.ones(4, *x.shape[:2])
    counts[:, 8:] = 0
    some, every = quantized(block, weights, x[:8]), quantized(block, weights, x)
    without = quantized(block, weights, x, counts=counts)

    def same(a, b):
        """The share of values that are equal: sums in another order decide some ties otherwise."""
        pairs = [(weight.packed == b.quantized[name].packed).float().mean() for name, weight in a.quantized.items()]
        return float(torch.stack(pairs).mean())

    assert same(some, without) > 0.99 > same(some, every)


def test_linears_in_eight_bits_lose_next_to_nothing(layer):
    block, weights, x = layer
    eight = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
    result = quantized(block, weights, x, 32, eight)
    assert {name for name, weight in result.quantized.items() if isinstance(weight, Int8Rows)} == set(eight)
    assert all((loss.bits == 8) == (loss.name in eight) for loss in result.losses)
    assert all(loss.error < 0.02 for loss in result.losses if loss.bits == 8)
    assert all(loss.alpha == loss.clipped == 0 for loss in result.losses if loss.bits == 8)


def test_groups_that_do_not_divide_are_refused_before_work(layer):
    block, weights, x = layer
    with pytest.raises(CannotQuantize, match=r"mlp\.down_proj has 96 inputs"):
        LayerCalibration(block, 64, (), CPU)
    result = quantized(block, weights, x, 64, ("mlp.down_proj",))
    assert isinstance(result.quantized["mlp.down_proj"], Int8Rows)
