"""Published configs as their folders hold them, and the tables of angles they ask for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidModel
from engine.model.config import parse_config
from engine.model.norm import RmsNorm
from engine.model.rope import inverse_frequencies, rope_table
from engine.model.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling

LLAMA_31 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL_01 = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN_25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def parse(raw: dict[str, Any], **changes: Any) -> Any:
    return parse_config({**raw, **changes}, "config.json")


def test_llama() -> None:
    config = parse(LLAMA_31)
    assert (config.family, config.layers, config.heads, config.kv_heads, config.head_dim) == ("llama", 32, 32, 8, 128)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == (False,) * 4
    assert config.windows == (None,) * 32
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    assert config.rope == RopeConfig(theta=500000.0, dim=128, scaling=scaling)
    assert (config.max_context, config.dtype, config.tied_head) == (131072, "bfloat16", False)


def test_mistral() -> None:
    config = parse(MISTRAL_01)
    assert config.windows == (4096,) * 32
    assert parse(MISTRAL_01, sliding_window=None).windows == (None,) * 32
    assert parse(MISTRAL_01, head_dim=96).head_dim == 96


def test_qwen2() -> None:
    config = parse(QWEN_25)
    assert (config.qkv_bias, config.output_bias, config.tied_head, config.head_dim) == (True, False, True, 64)
    assert config.windows == (None,) * 24
    used = parse(QWEN_25, use_sliding_window=True, max_window_layers=20)
    assert used.windows == (None,) * 20 + (32768,) * 4
    stretched = parse(QWEN_25, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768})
    assert stretched.max_context == 131072
    assert isinstance(stretched.rope.scaling, YarnScaling)


def test_qwen3() -> None:
    config = parse(QWEN_3)
    assert (config.qk_norm, config.qkv_bias, config.head_dim, config.rope.theta) == (True, False, 128, 1e6)
    written_by_5 = {key: value for key, value in QWEN_3.items() if not key.startswith(("rope_", "torch_"))}
    written_by_5 |= {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}
    assert parse(written_by_5) == config


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


@given(base=st.sampled_from([LLAMA_31, MISTRAL_01, QWEN_25, QWEN_3]), data=st.data())
def test_no_value_of_any_key_does_more_than_refuse(base: dict[str, Any], data: st.DataObject) -> None:
    key = data.draw(
        st.sampled_from([*base, "head_dim", "layer_types", "quantization_config", "dtype", "architectures"])
    )
    value = data.draw(values)
    try:
        config = parse(base, **{key: value})
    except InvalidModel as error:
        if not str(error).startswith("config.json: ") or len(str(error).splitlines()) != 1:
            raise AssertionError("a message must name the file, in one line") from error
        return
    assert config.heads % config.kv_heads == 0
    assert config.head_dim % 2 == 0
    assert 0 < config.layers <= 1024


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "yarn"),
        ({"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({"type": "yarn", "factor": float("nan")}, "factor"),
        ({"type": "yarn", "factor": 2.0, "truncate": "no"}, "truncate"),
        ({"type": 7}, "rope_type"),
    ],
)
def test_scalings_that_cannot_be_computed_are_refused(section: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidModel, match=word):
        parse(QWEN_3, rope_scaling=section)


# Angles


def test_angles_turn_pairs_of_halves() -> None:
    config = RopeConfig(theta=100.0, dim=8, scaling=LinearScaling(factor=2.0))
    table = rope_table(config, 5, torch.device("cpu"))
    assert table.shape == (5, 2, 8)
    x = torch.randn(8, generator=torch.Generator().manual_seed(0))
    for position in range(5):
        cos, sin = table[position]
        turned = x * cos + torch.cat((x[4:], x[:4])) * sin
        for pair in range(4):
            angle = position * 100.0 ** (-2 * pair / 8) / 2.0
            low, high = float(x[pair]), float(x[pair + 4])
            assert float(turned[pair]) == pytest.approx(low * math.cos(angle) - high * math.sin(angle), abs=1e-5)
            assert float(turned[pair + 4]) == pytest.approx(high * math.cos(angle) + low * math.sin(angle), abs=1e-5)


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


def test_norm_is_exact_whatever_the_scale() -> None:
    generator = torch.Generator().manual_seed(1)
    for scale in (0.0, 1e-6, 1.0, 1e4):
        for shape, weight in (((3, 256), (256,)), ((2, 6, 64), (6, 64))):
            x = torch.randn(shape, generator=generator) * scale
            gain = torch.rand(weight, generator=generator) + 0.5
            exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain.double()
            torch.testing.assert_close(RmsNorm(gain, 1e-6)(x).double(), exact, rtol=3e-6, atol=1e-9)
