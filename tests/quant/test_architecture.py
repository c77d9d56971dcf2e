"""config.json in both spellings, and configs that name what is not served."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.architecture import read_architecture
from quant.errors import BadConfig, QuantError, UnsupportedFormat

OLD = {
    "model_type": "qwen3",
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


def changed(**fields):
    return {**OLD, **fields}


def test_both_spellings_say_the_same():
    new = {name: value for name, value in OLD.items() if not name.startswith("rope")}
    new["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    assert read_architecture(new) == read_architecture(OLD)
    assert read_architecture(OLD).rope.theta == 5000.0


def test_defaults():
    bare = {name: value for name, value in OLD.items() if name not in ("head_dim", "num_key_value_heads")}
    found = read_architecture({**bare, "rope_scaling": None})
    assert (found.head_dim, found.kv_heads, found.rope.kind) == (16, 4, "default")


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
        ({"model_type": "mistral", "sliding_window": 8}, (8,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "llama", "sliding_window": 8}, (None,) * 4),
    ],
)
def test_windows(fields, windows):
    assert read_architecture(changed(**fields)).windows == windows


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "gemma2"},
        {"model_type": None},
        {"hidden_act": "gelu"},
    ],
)
def test_what_is_not_served_is_refused_by_name(fields):
    with pytest.raises(UnsupportedFormat):
        read_architecture(changed(**fields))


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
        ({"rope_scaling": "linear"}, "rope_parameters"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_a_wrong_field_is_named(fields, field):
    with pytest.raises(BadConfig) as caught:
        read_architecture(changed(**fields))
    assert caught.value.field == field


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*OLD, "sliding_window", "layer_types", "use_sliding_window"]), ANYTHING))
def test_anything_gives_an_architecture_or_a_refusal(fields):
    said = ""
    try:
        found = read_architecture(changed(**fields))
        assert found.layers == changed(**fields)["num_hidden_layers"]
    except QuantError as error:
        said = str(error)
    assert "\n" not in said
