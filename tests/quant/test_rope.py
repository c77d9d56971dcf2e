"""Rotary frequencies against transformers' own tables, rule by rule."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quant.architecture import read_architecture
from quant.errors import UnsupportedFormat
from quant.rope import RopeRule, rotation

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
def test_tables_are_those_of_transformers(rule, theta):
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=128,
        rope_parameters={**rule, "rope_theta": theta},
    )
    positions = 200 if rule["rope_type"] == "dynamic" else 90
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(positions).unsqueeze(0))
    architecture = read_architecture(config.to_dict())
    found = rotation(architecture.rope, architecture.head_dim, positions, CPU)
    assert torch.allclose(found.cos, cos[0, :, :8], atol=2e-4)
    assert torch.allclose(found.sin, sin[0, :, :8], atol=2e-4)


def test_an_unknown_rule_is_refused():
    with pytest.raises(UnsupportedFormat, match="longrope"):
        rotation(RopeRule("longrope", 1e4, {}, 128), 16, 8, CPU)
