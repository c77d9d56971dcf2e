"""What a config leaves out, against transformers: every field with its config classes, logits with its models.

Each family states every key that it knows, with values that are not the defaults. Then one key is left out, or is null
where the class allows that, or all are left out.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from quant.checkpoint.angles import inverse_frequencies
from quant.checkpoint.config import FAMILIES, ModelConfig, parse_config
from quant.checkpoint.rope import RopeConfig
from quant.checkpoint.tensors import dense_tensors
from quant.decoder import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

pytestmark = pytest.mark.proof

SIZES = {
    "vocab_size": 61,
    "hidden_size": 128,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
}
COMMON = {
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 40,
    "rms_norm_eps": 1e-2,
    "tie_word_embeddings": True,
    "rope_theta": 50.0,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
BY_LAYER = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 3.0,
}
GEMMA = {
    **{key: value for key, value in COMMON.items() if key not in ("hidden_act", "tie_word_embeddings")},
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": False,
    "head_dim": 6,
    "attention_bias": True,
    "query_pre_attn_scalar": 9,
    "sliding_window": 5,
    "rope_local_base_freq": 30.0,
}
OPTIONAL: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "head_dim": 6, "attention_bias": True, "mlp_bias": True},
    "mistral": {**COMMON, "head_dim": 6, "sliding_window": 5},
    "qwen2": {**COMMON, **WINDOWS},
    "qwen2-by-layer": {**COMMON, **WINDOWS, **BY_LAYER},
    "qwen3": {**COMMON, "head_dim": 6, "attention_bias": True, **WINDOWS},
    "qwen3-by-layer": {**COMMON, "head_dim": 6, "attention_bias": True, **WINDOWS, **BY_LAYER},
    "gemma3": {**GEMMA, "sliding_window_pattern": 2},
    "gemma3-by-layer": {**GEMMA, **BY_LAYER},
    "olmo2": {**COMMON, "attention_bias": True},
    "granite": {**COMMON, "attention_bias": True, "mlp_bias": True, **MULTIPLIERS},
}
NULLABLE = ("num_key_value_heads", "sliding_window", "layer_types")
REFUSED = {
    ("mistral", "null num_key_value_heads"),  # by the config class
    *((f"{family}-by-layer", "without use_sliding_window") for family in ("qwen2", "qwen3")),  # sliding layers without
    *((f"{family}-by-layer", "null sliding_window") for family in ("qwen2", "qwen3")),  # a window: by us at once
    ("gemma3", "null sliding_window"),
    ("gemma3-by-layer", "null sliding_window"),
    ("gemma3", "null num_key_value_heads"),  # by the config class
    ("gemma3-by-layer", "null num_key_value_heads"),
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "yarn-original-beside": {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10},
        "original_max_position_embeddings": 20,
    },
    "llama3": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    "theta-inside": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    "both-spellings": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 70.0},
    },
    "empty-section": {"rope_parameters": {}, "rope_scaling": None},
}


# Of Gemma 3, whose layers with a window have angles of their own.
SCALINGS_BY_KIND: dict[str, dict[str, Any]] = {
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "by-kind": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        }
    },
    "full-alone": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 300.0}}},
    "no-section": {"rope_parameters": None, "rope_scaling": None},
}


def scalings(family: str) -> dict[str, dict[str, Any]]:
    return SCALINGS_BY_KIND if family.startswith("gemma3") else SCALINGS


def architecture(family: str) -> str:
    return f"{family.partition('-')[0].capitalize()}ForCausalLM"


def config_of(family: str, case: str) -> dict[str, Any]:
    """config.json of a case."""
    whole = {"architectures": [architecture(family)], **SIZES, **OPTIONAL[family]}
    how, _, key = case.partition(" ")
    if how == "without":
        return {name: value for name, value in whole.items() if name != key}
    if how == "null":
        return {**whole, key: None}
    if how == "bare":
        return {"architectures": [architecture(family)], **SIZES}
    return {**whole, **scalings(family)[key]}


def cases() -> list[tuple[str, str]]:
    found = []
    for family, optional in OPTIONAL.items():
        found += [(family, f"without {key}") for key in optional]
        found += [(family, f"null {key}") for key in optional if key in NULLABLE]
        found.append((family, "bare"))
        if not family.endswith("by-layer"):
            found += [(family, f"scaled {name}") for name in scalings(family)]
    return [(family, case) for family, case in found if (family, case) not in REFUSED]


CASES = cases()
NAMES = [f"{family}: {case}" for family, case in CASES]


def theirs_of(raw: dict[str, Any]) -> PreTrainedConfig:
    import transformers

    family = raw["architectures"][0].removesuffix("ForCausalLM")
    kind: type[PreTrainedConfig] = getattr(transformers, f"{family}TextConfig", None) or getattr(
        transformers, f"{family}Config"
    )
    theirs = kind.from_dict(copy.deepcopy(raw))
    theirs.standardize_rope_params()  # as their models do once more, after what the class has no field for
    return theirs


def windows_of(theirs: Any, layers: int) -> tuple[int | None, ...]:
    kinds = getattr(theirs, "layer_types", None)
    window = getattr(theirs, "sliding_window", None)
    if kinds is None:
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@pytest.mark.parametrize(("family", "case"), CASES, ids=NAMES)
def test_every_field_is_that_of_the_config_class(family: str, case: str) -> None:
    raw = config_of(family, case)
    for layers in (SIZES["num_hidden_layers"], 30):  # thirty: beyond the default of max_window_layers
        if layers == 30 and "layer_types" in raw:
            continue
        deep = {**raw, "num_hidden_layers": layers}
        compare(parse_config(deep, "config.json"), theirs_of(deep))


def compare(ours: ModelConfig, theirs: Any) -> None:
    assert ours.vocab_size == theirs.vocab_size
    assert (ours.hidden_size, ours.intermediate_size) == (theirs.hidden_size, theirs.intermediate_size)
    assert (ours.heads, ours.kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    unit = getattr(theirs, "residual_multiplier", 1.0)
    assert ours.norm_eps == pytest.approx(theirs.rms_norm_eps / unit**2)
    if ours.family == "granite":
        assert ours.embedding_scale == pytest.approx(theirs.embedding_multiplier / unit)
        assert ours.rope.gain == pytest.approx((theirs.attention_multiplier * ours.head_dim**0.5) ** 0.5)
        assert ours.logit_scale == pytest.approx(1 / theirs.logits_scaling)
    assert ours.tied_head == theirs.tie_word_embeddings
    assert {"silu": "silu", "gelu": "gelu_pytorch_tanh"}[ours.activation] == activation_of(theirs)
    assert ours.output_bias == getattr(theirs, "attention_bias", False)
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert ours.layers == theirs.num_hidden_layers
    assert ours.windows == windows_of(theirs, ours.layers)
    rope = theirs.rope_parameters
    if ours.window_rope is not None:
        compare_ropes(ours.window_rope, rope["sliding_attention"])
        rope = rope["full_attention"]
        assert ours.query_scale == pytest.approx((ours.head_dim / theirs.query_pre_attn_scalar) ** 0.5)
    kind = compare_ropes(ours.rope, rope)
    stretch = rope["original_max_position_embeddings"] * rope["factor"] if kind == "yarn" else 0
    assert ours.max_context == max(theirs.max_position_embeddings, stretch)


def compare_ropes(ours: RopeConfig, theirs: dict[str, Any]) -> str:
    """Returns the kind of scaling."""
    assert ours.theta == theirs["rope_theta"]
    kind = type(ours.scaling).__name__.removesuffix("Scaling").lower() if ours.scaling else "default"
    assert kind == theirs["rope_type"]
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        if kind != "default" and name in theirs:
            assert getattr(ours.scaling, name) == theirs[name]
    if kind in ("yarn", "llama3"):
        assert ours.scaling.original_context == theirs["original_max_position_embeddings"]  # type: ignore[union-attr]
    return kind


def activation_of(theirs: Any) -> str:
    found: str = theirs.hidden_activation if hasattr(theirs, "hidden_activation") else theirs.hidden_act
    return found


@pytest.mark.parametrize(("family", "case"), CASES, ids=NAMES)
def test_tensors_and_logits_are_those_of_the_model(family: str, case: str, tmp_path: Path) -> None:
    """All positions that are served, up to forty, which is as far as the angles of `dynamic` stay as trained."""
    raw = config_of(family, case)
    ours, theirs = parse_config(raw, "config.json"), theirs_of(raw)
    torch.manual_seed(1)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.uniform_(0.5, 1.5) if tensor.dim() == 1 else tensor.normal_(0.0, 1.2 / tensor.shape[1] ** 0.5)
    held = {name: one.contiguous() for name, one in model.state_dict().items()}
    if ours.tied_head:
        del held["lm_head.weight"]
    assert {name: tuple(one.shape) for name, one in held.items()} == dense_tensors(ours)
    save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ids = torch.randint(0, 61, (1, 40), generator=torch.Generator().manual_seed(2))
    decoder = Decoder.open(tmp_path)
    with torch.no_grad():
        expected, found = model(ids).logits, decoder.logits(decoder.hidden(ids))
    assert float((found - expected).abs().max()) < 2e-4 * float(expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_windows_of_a_family_are_far_away(family: str) -> None:
    """So a tiny model cannot show them; the field alone can."""
    raw = {"architectures": [family], **SIZES, "num_hidden_layers": 30, "use_sliding_window": True}
    ours, theirs = parse_config(raw, "config.json"), theirs_of(raw)
    assert ours.windows == windows_of(theirs, 30)
    assert (4096 in ours.windows) is hasattr(theirs, "sliding_window")


def test_a_dynamic_scaling_ends_where_its_angles_would_change() -> None:
    raw = {"architectures": ["LlamaForCausalLM"], **SIZES, **OPTIONAL["llama"], **SCALINGS["dynamic"]}
    ours = parse_config(raw, "config.json")
    plain = parse_config({**raw, "rope_scaling": None}, "config.json")
    assert ours.max_context == 40
    assert torch.equal(inverse_frequencies(ours.rope)[0], inverse_frequencies(plain.rope)[0])
