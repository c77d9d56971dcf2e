"""config.json: published ones, both spellings, what is left out, and what is not served."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.checkpoint.config import ModelConfig, parse_config
from quant.checkpoint.errors import BadFile, CheckpointError
from quant.checkpoint.rope import Llama3Scaling, RopeConfig, YarnScaling
from tests.properties import example_count

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


def changed(raw: dict[str, Any], **changes: Any) -> Any:
    return parse_config({**raw, **changes}, "config.json")


def test_llama() -> None:
    config = changed(LLAMA_31)
    assert (config.family, config.layers, config.heads, config.kv_heads, config.head_dim) == ("llama", 32, 32, 8, 128)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == (False,) * 4
    assert config.windows == (None,) * 32
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    assert config.rope == RopeConfig(theta=500000.0, dim=128, scaling=scaling)
    assert (config.max_context, config.dtype, config.tied_head) == (131072, "bfloat16", False)


def test_mistral() -> None:
    config = changed(MISTRAL_01)
    assert config.windows == (4096,) * 32
    assert changed(MISTRAL_01, sliding_window=None).windows == (None,) * 32
    assert changed(MISTRAL_01, head_dim=96).head_dim == 96


def test_qwen2() -> None:
    config = changed(QWEN_25)
    assert (config.qkv_bias, config.output_bias, config.tied_head, config.head_dim) == (True, False, True, 64)
    assert config.windows == (None,) * 24
    used = changed(QWEN_25, use_sliding_window=True, max_window_layers=20)
    assert used.windows == (None,) * 20 + (32768,) * 4
    stretched = changed(
        QWEN_25, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    )
    assert stretched.max_context == 131072
    assert isinstance(stretched.rope.scaling, YarnScaling)


def test_qwen3() -> None:
    config = changed(QWEN_3)
    assert (config.qk_norm, config.qkv_bias, config.head_dim, config.rope.theta) == (True, False, 128, 1e6)
    written_by_5 = {key: value for key, value in QWEN_3.items() if not key.startswith(("rope_", "torch_"))}
    written_by_5 |= {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}
    assert changed(written_by_5) == config


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
        config = changed(base, **{key: value})
    except BadFile as error:
        if not str(error).startswith("config.json: ") or len(str(error).splitlines()) != 1:
            raise AssertionError("a message must name the file, in one line") from error
        return
    assert config.heads % config.kv_heads == 0
    assert config.head_dim % 2 == 0
    assert 0 < config.layers <= 1024


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' is not served.*yarn"),
        ({"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({"type": "yarn", "factor": float("nan")}, "factor"),
        ({"type": "yarn", "factor": 2.0, "truncate": "no"}, "truncate"),
        ({"type": 7}, "rope_type"),
    ],
)
def test_scalings_that_cannot_be_computed_are_refused(section: dict[str, Any], word: str) -> None:
    with pytest.raises(BadFile, match=word):
        changed(QWEN_3, rope_scaling=section)


MISTRAL = {"architectures": ["MistralForCausalLM"]}
OLD = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def parse(**fields: Any) -> ModelConfig:
    return parse_config({**OLD, **fields}, "config.json")


def test_both_spellings_say_the_same() -> None:
    new = {name: value for name, value in OLD.items() if not name.startswith("rope")}
    new["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    assert parse_config(new, "config.json") == parse()
    assert parse().rope.theta == 5000.0


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 8}, (None,) * 4),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 8)),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 8, None, 8),
        ),
        ({**MISTRAL, "sliding_window": 8}, (8,) * 4),
        ({**MISTRAL, "sliding_window": None}, (None,) * 4),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 8}, (None,) * 4),
    ],
)
def test_windows(fields: Any, windows: Any) -> None:
    assert parse(**fields).windows == windows


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["Gemma2ForCausalLM"]},
        {"architectures": None},
        {"hidden_act": "gelu"},
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: Any) -> None:
    with pytest.raises(BadFile, match="is not served"):
        parse(**fields)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_hidden_layers": 10**20}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_a_wrong_field_is_named(fields: Any, field: Any) -> None:
    with pytest.raises(BadFile, match=rf"^config\.json: (rope_scaling\.)?{field}: "):
        parse(**fields)


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())


@settings(max_examples=example_count(150), deadline=None)
@given(st.dictionaries(st.sampled_from([*OLD, "sliding_window", "layer_types", "use_sliding_window"]), ANYTHING))
def test_anything_gives_an_architecture_or_a_refusal(fields: Any) -> None:
    said = ""
    try:
        found = parse(**fields)
        assert found.layers == {**OLD, **fields}["num_hidden_layers"]
    except CheckpointError as error:
        said = str(error)
    assert "\n" not in said
