"""Folding a scale changes weights and leaves the layer's output as it was."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant.block import Block, BlockWeights
from quant.checkpoint.config import ModelConfig, parse_config
from quant.checkpoint.tensors import layer_linears, layer_norms
from quant.fold import Fold, fold_in, folds
from quant.rotation import rotation

CPU = torch.device("cpu")


def shape(family: str, heads: int, kv_heads: int) -> ModelConfig:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "vocab_size": 10, "head_dim": 6}
    printable = {"architectures": [f"{family.capitalize()}ForCausalLM"], "num_attention_heads": heads}
    return parse_config({**printable, "num_key_value_heads": kv_heads, **sizes}, "config.json")


def random_weights(config: ModelConfig, biased: bool, random: torch.Generator) -> BlockWeights:
    weights: BlockWeights = {}
    for name, (inputs, outputs) in layer_linears(config).items():
        weights[f"{name}.weight"] = torch.randn(outputs, inputs, generator=random) / inputs**0.5
        if biased:
            weights[f"{name}.bias"] = torch.randn(outputs, generator=random)
    for name, size in layer_norms(config).items():
        weights[f"{name}.weight"] = torch.rand(size, generator=random) + 0.5
    return weights


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("family", "heads", "kv_heads"), [("llama", 4, 4), ("mistral", 4, 2), ("qwen2", 6, 1), ("qwen3", 4, 2)]
)
def test_every_fold_leaves_the_output_as_it_was(random, family, heads, kv_heads, biased):
    config = shape(family, heads, kv_heads)
    weights = random_weights(config, biased, random)
    block = Block(config, None, rotation(config.rope, 7, CPU))
    x = torch.randn(2, 7, 24, generator=random)
    expected = block.forward(weights, x)
    for fold in folds(config):
        before = dict(weights)
        fold_in(weights, fold, torch.rand(fold.channels, generator=random) * 3 + 0.1)
        assert any(not torch.equal(weights[name], before[name]) for name in weights)
        assert torch.allclose(block.forward(weights, x), expected, atol=2e-5)


def test_every_linear_is_in_one_fold():
    config = shape("qwen3", 4, 2)
    named = [name for fold in folds(config) for name in fold.linears]
    assert sorted(named) == sorted(layer_linears(config))
    assert all(fold.inputs == layer_linears(config)[name][0] for fold in folds(config) for name in fold.linears)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_heads_that_share_get_one_scale(kv_heads, share, head_dim):
    fold = Fold(("o",), "v", kv_heads * share * head_dim, share, head_dim)
    scale = torch.arange(1.0, kv_heads * head_dim + 1)
    columns = fold.to_inputs(scale)
    # query head h reads key-value head h // share
    expected = [
        float(scale[(head // share) * head_dim + place])
        for head in range(kv_heads * share)
        for place in range(head_dim)
    ]
    assert columns.tolist() == expected
    assert torch.allclose(fold.to_channels(columns), scale)
