"""Folding a scale changes weights and leaves the layer's output as it was."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant.architecture import Architecture, read_architecture
from quant.block import Block, BlockWeights
from quant.fold import Fold, fold_in, folds
from quant.rope import rotation

CPU = torch.device("cpu")


def shape(family: str, heads: int, kv_heads: int) -> Architecture:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "vocab_size": 10, "head_dim": 6}
    return read_architecture(
        {"model_type": family, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **sizes}
    )


def random_weights(architecture: Architecture, biased: bool, random: torch.Generator) -> BlockWeights:
    weights: BlockWeights = {}
    for name, (inputs, outputs) in architecture.linears().items():
        weights[f"{name}.weight"] = torch.randn(outputs, inputs, generator=random) / inputs**0.5
        if biased:
            weights[f"{name}.bias"] = torch.randn(outputs, generator=random)
    for name, size in architecture.norms().items():
        weights[f"{name}.weight"] = torch.rand(size, generator=random) + 0.5
    return weights


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("family", "heads", "kv_heads"), [("llama", 4, 4), ("mistral", 4, 2), ("qwen2", 6, 1), ("qwen3", 4, 2)]
)
def test_every_fold_leaves_the_output_as_it_was(random, family, heads, kv_heads, biased):
    architecture = shape(family, heads, kv_heads)
    weights = random_weights(architecture, biased, random)
    block = Block(architecture, None, rotation(architecture.rope, architecture.head_dim, 7, CPU))
    x = torch.randn(2, 7, 24, generator=random)
    expected = block.forward(weights, x)
    for fold in folds(architecture):
        before = dict(weights)
        fold_in(weights, fold, torch.rand(fold.channels, generator=random) * 3 + 0.1)
        assert any(not torch.equal(weights[name], before[name]) for name in weights)
        assert torch.allclose(block.forward(weights, x), expected, atol=2e-5)


def test_every_linear_is_in_one_fold():
    architecture = shape("qwen3", 4, 2)
    named = [name for fold in folds(architecture) for name in fold.linears]
    assert sorted(named) == sorted(architecture.linears())
    assert all(fold.inputs == architecture.linears()[name][0] for fold in folds(architecture) for name in fold.linears)


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
