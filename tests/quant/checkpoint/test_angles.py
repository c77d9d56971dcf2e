"""Rotary frequencies under each scaling, against transformers' own tables."""

from __future__ import annotations

import math

import pytest
import torch

from quant.checkpoint.angles import inverse_frequencies
from quant.checkpoint.config import parse_config
from quant.checkpoint.rope import Llama3Scaling, RopeConfig
from quant.rotation import rotation

CPU = torch.device("cpu")
RULES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.25},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.5},
]


@pytest.mark.parametrize("theta", [500.0, 1e6])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(str(value) for value in rule.values()))
def test_tables_are_those_of_transformers(rule: dict[str, object], theta: float) -> None:
    """Over every position that is served: all that the model was made for, and what YaRN adds."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=128,
        rope_parameters={**rule, "rope_theta": theta},
    )
    ours = parse_config(theirs.to_dict(), "config.json")
    positions = ours.max_context
    assert positions == 128
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), torch.arange(positions).unsqueeze(0))
    found = rotation(ours.rope, positions, CPU)
    assert torch.allclose(found.cos, cos[0, :, :8], atol=2e-4)
    assert torch.allclose(found.sin, sin[0, :, :8], atol=2e-4)


def test_llama3_keeps_fast_and_divides_slow() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    plain, _ = inverse_frequencies(RopeConfig(theta=500000.0, dim=128, scaling=None))
    found, sharpness = inverse_frequencies(RopeConfig(theta=500000.0, dim=128, scaling=scaling))
    turns = 8192 * plain / (2 * math.pi)
    assert torch.equal(found[turns > 4], plain[turns > 4])
    assert torch.equal(found[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((found < plain) & (found > plain / 8))[between].all()
    assert sharpness == 1.0
