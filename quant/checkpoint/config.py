"""Reads and checks a model folder's config.json, and converts it to one shape.

Reads the spellings of transformers 4 (`torch_dtype`, `rope_theta`, `rope_scaling`) and 5 (`dtype`, `rope_parameters`).
A key that is left out has the value that the family's config class in transformers gives it. Whatever would be computed
wrongly is refused here, by file, key and remedy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from quant.checkpoint.errors import short
from quant.checkpoint.fields import Fields
from quant.checkpoint.rope import RopeConfig, context_limit, parse_rope, parse_ropes_by_kind

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3", "granite", "olmo2"]
Activation = Literal["silu", "gelu"]  # of the gate; gelu is its approximation by tanh

CONFIG: Final = "config.json"
WEIGHT_DTYPES: Final = ("float32", "bfloat16", "float16")
MAX_LAYERS: Final = 1024
SLIDING_WINDOW: Final = 4096  # positions, where a family with windows states none
FULL_LAYERS: Final = 28  # of Qwen: layers before the first with a window
MOST_MULTIPLIER: Final = 1e6  # published ones are below 20
PATTERN: Final = 6  # of Gemma 3: every sixth layer has no window


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Properties that all models of a family have in common."""

    family: Family
    qk_norm: bool = False
    wide_qk_norm: bool = False  # whether a norm takes all heads of queries, or of keys, as one
    activation: Activation = "silu"
    norm_offset: float = 0.0  # what is added to the stored weights of norms
    input_norms: bool = True  # whether what attention and MLP read is normalised
    output_norms: bool = False  # whether what they compute is, before it is added to the residual
    embedding_scale_rounded: bool = False  # whether the scale is rounded to the embedding's type, as it was in training


@dataclass(frozen=True, slots=True, kw_only=True)
class _FamilyRules(Traits):
    """Differences between the families. None as `kv_heads` or `head_dim`: derived from other sizes. `sizes` are those
    that the family's config may leave out."""

    max_positions: int
    kv_heads: int | None = None
    head_dim: int | None = None
    attention_bias: bool = False  # whether the config may switch on biases of all four projections
    qkv_bias: bool = False  # whether queries, keys and values always have one
    mlp_bias: bool = False  # whether the config may switch it on
    norm_eps: float = 1e-6
    scaled_queries: bool = False  # whether the config states the scale of attention
    multipliers: bool = False  # whether the config states factors on embedding, residuals, attention and logits
    ropes_by_kind: bool = False  # whether layers with a window have rotary angles of their own
    tied_head: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)


FAMILIES: Final = {
    "LlamaForCausalLM": _FamilyRules(family="llama", max_positions=2048, attention_bias=True, mlp_bias=True),
    "MistralForCausalLM": _FamilyRules(family="mistral", max_positions=131072, kv_heads=8),
    "Qwen2ForCausalLM": _FamilyRules(family="qwen2", max_positions=32768, kv_heads=32, qkv_bias=True),
    "Qwen3ForCausalLM": _FamilyRules(
        family="qwen3", max_positions=32768, kv_heads=32, head_dim=128, attention_bias=True, qk_norm=True
    ),
    "Gemma3ForCausalLM": _FamilyRules(
        family="gemma3",
        max_positions=131072,
        kv_heads=4,
        head_dim=256,
        attention_bias=True,
        qk_norm=True,
        activation="gelu",
        norm_offset=1.0,
        output_norms=True,
        embedding_scale_rounded=True,
        scaled_queries=True,
        ropes_by_kind=True,
        tied_head=True,
        sizes={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
    ),
    "GraniteForCausalLM": _FamilyRules(
        family="granite", max_positions=2048, attention_bias=True, mlp_bias=True, multipliers=True
    ),
    "Olmo2ForCausalLM": _FamilyRules(
        family="olmo2",
        max_positions=2048,
        attention_bias=True,
        qk_norm=True,
        wide_qk_norm=True,
        norm_eps=1e-5,
        input_norms=False,
        output_norms=True,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Traits):
    """The shape of one model. Sizes count elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_context: int  # positions that the model was made for
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    embedding_scale: float
    query_scale: float  # of attention, beside the usual head_dim ** -0.5; needs norms of heads to be folded into
    logit_scale: float
    windows: tuple[int | None, ...]  # one a layer: how many positions back it sees, itself included; None: all
    rope: RopeConfig
    window_rope: RopeConfig | None  # of layers with a window, where theirs differs
    dtype: str | None  # of the checkpoint, as it says

    @property
    def layers(self) -> int:
        return len(self.windows)


def parse_config(raw: dict[str, Any], file: str) -> ModelConfig:
    """Checks the parsed config; `file` is for messages."""
    fields = Fields(raw, file)
    architecture = _architecture(fields)
    rules = FAMILIES[architecture]
    sizes = rules.sizes
    heads = fields.integer("num_attention_heads", default=sizes.get("num_attention_heads"), minimum=1)
    hidden = fields.integer("hidden_size", default=sizes.get("hidden_size"), minimum=1)
    head_dim = _head_dim(fields, rules, hidden, heads)
    _refuse_unknown_computation(fields, rules)
    attention_bias = _switch(fields, "attention_bias", rules.attention_bias, architecture)
    max_positions = fields.integer("max_position_embeddings", default=rules.max_positions, minimum=1)
    rope, window_rope = (
        parse_ropes_by_kind(fields, head_dim, max_positions)
        if rules.ropes_by_kind
        else (parse_rope(fields, head_dim, max_positions), None)
    )
    scales = _scales(fields, rules, hidden, head_dim)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_vocabulary(fields, sizes.get("vocab_size")),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", default=sizes.get("intermediate_size"), minimum=1),
        heads=heads,
        kv_heads=_kv_heads(fields, rules, heads),
        head_dim=head_dim,
        norm_eps=fields.within("rms_norm_eps", 0.0, 1.0, default=rules.norm_eps) / scales.residual**2,
        max_context=context_limit(max_positions, rope),
        tied_head=fields.boolean("tie_word_embeddings", default=rules.tied_head),
        qkv_bias=attention_bias or rules.qkv_bias,
        output_bias=attention_bias,
        mlp_bias=_switch(fields, "mlp_bias", rules.mlp_bias, architecture),
        **{trait.name: getattr(rules, trait.name) for trait in dataclasses.fields(Traits)},
        embedding_scale=scales.embedding / scales.residual,
        query_scale=_query_scale(fields, head_dim) if rules.scaled_queries else 1.0,
        logit_scale=scales.logits,
        windows=_windows(fields, rules),
        rope=replace(rope, gain=math.sqrt(scales.attention)),
        window_rope=window_rope,
        dtype=_dtype(fields),
    )


def _architecture(fields: Fields) -> str:
    names = fields.raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in FAMILIES:
        fields.refuse("architectures", f"{name!r} is not served", f"use one of {', '.join(FAMILIES)}")
    return name


def _vocabulary(fields: Fields, default: int | None) -> int:
    size = fields.integer("vocab_size", default=default, minimum=1)
    ends = fields.raw.get("eos_token_id")
    for end in ends if isinstance(ends, list) else [ends]:
        if type(end) is int and end >= size:
            fields.refuse("eos_token_id", f"{short(end)} is beyond the vocabulary of {size}", "mend the config")
    return size


def _kv_heads(fields: Fields, rules: _FamilyRules, heads: int) -> int:
    """Left out: the class's own number where it has one; null: as many as heads, in every class."""
    stated = "num_key_value_heads" in fields.raw
    default = heads if stated or rules.kv_heads is None else rules.kv_heads
    kv_heads = fields.integer("num_key_value_heads", default=default, minimum=1)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"{heads} heads do not divide among {kv_heads}", "mend the config")
    return kv_heads


def _head_dim(fields: Fields, rules: _FamilyRules, hidden: int, heads: int) -> int:
    if fields.raw.get("head_dim") is not None:
        return fields.integer("head_dim", minimum=2)
    if rules.head_dim is not None:
        return rules.head_dim
    if hidden % heads:
        fields.refuse("hidden_size", f"{hidden} does not divide among {heads} heads", "state head_dim")
    return hidden // heads


def _switch(fields: Fields, key: str, known: bool, architecture: str) -> bool:
    """Biases that only some families can have."""
    found = fields.boolean(key, default=False)
    if found and not known:
        fields.refuse(key, f"{architecture} has none to switch on", "remove the key")
    return found


@dataclass(frozen=True, slots=True)
class _Scales:
    """Factors on parts of the computation. That on residuals is the unit of the residual stream, which no walk needs to
    know: in this unit the embedding is larger, and so is what norms add to a mean square."""

    embedding: float = 1.0
    residual: float = 1.0
    attention: float = 1.0  # beside the usual head_dim ** -0.5; half of it is a factor on queries, half on keys
    logits: float = 1.0


def _scales(fields: Fields, rules: _FamilyRules, hidden: int, head_dim: int) -> _Scales:
    if not rules.multipliers:
        return _Scales(embedding=math.sqrt(hidden) if rules.embedding_scale_rounded else 1.0)

    def factor(key: str) -> float:
        return fields.within(key, 0.0, MOST_MULTIPLIER, default=1.0)

    return _Scales(
        factor("embedding_multiplier"),
        factor("residual_multiplier"),
        factor("attention_multiplier") * math.sqrt(head_dim),
        1 / factor("logits_scaling"),
    )


def _query_scale(fields: Fields, head_dim: int) -> float:
    """Returns the factor from the usual scale of attention to the one that the config states."""
    return math.sqrt(head_dim / fields.within("query_pre_attn_scalar", 0.0, 1e6, default=256.0))


def _refuse_unknown_computation(fields: Fields, rules: _FamilyRules) -> None:
    known: tuple[str, ...]
    key, known = "hidden_act", ("silu", "swish")
    if rules.activation == "gelu":
        key, known = "hidden_activation", ("gelu_pytorch_tanh",)
    act = fields.raw.get(key, known[0])
    if act not in known:
        fields.refuse(key, f"{short(act)} is not served", f"use a model with {known[0]}")
    if fields.boolean("use_bidirectional_attention", default=False):
        fields.refuse("use_bidirectional_attention", "is not served", "use a model that generates text")
    for key in ("num_local_experts", "num_experts", "attn_logit_softcapping", "final_logit_softcapping"):
        if fields.raw.get(key):
            fields.refuse(key, "is not served", "use a dense model without it")
    for key in ("logit_scale", *(() if rules.multipliers else ("residual_multiplier", "embedding_multiplier"))):
        if fields.number(key, default=1.0) != 1.0:
            fields.refuse(key, "is not served", "use a model where it is 1.0")


def _windows(fields: Fields, rules: _FamilyRules) -> tuple[int | None, ...]:
    family, default = rules.family, rules.sizes.get("num_hidden_layers")
    layers = fields.integer("num_hidden_layers", default=default, minimum=1, maximum=MAX_LAYERS)
    if family in ("llama", "granite", "olmo2"):
        return (None,) * layers
    window = fields.raw.get("sliding_window", SLIDING_WINDOW)
    if window is not None:
        window = fields.integer("sliding_window", default=SLIDING_WINDOW, minimum=1)
    if family == "mistral":
        if fields.raw.get("layer_types") is not None:
            fields.refuse("layer_types", "MistralForCausalLM has one window for all layers", "remove the key")
        return (window,) * layers
    kinds = fields.raw.get("layer_types")
    if family == "gemma3":
        if kinds is None:
            pattern = fields.integer("sliding_window_pattern", default=PATTERN, minimum=1)
            every = ["sliding_attention"] * (pattern - 1) + ["full_attention"]
            kinds = [every[index % pattern] for index in range(layers)]
        return _windows_of_kinds(fields, kinds, window, layers)
    if not fields.boolean("use_sliding_window", default=False):
        window = None
    if kinds is None:
        first = fields.integer("max_window_layers", default=FULL_LAYERS, minimum=0)
        return tuple(window if index >= first else None for index in range(layers))
    return _windows_of_kinds(fields, kinds, window, layers)


def _windows_of_kinds(fields: Fields, kinds: object, window: int | None, layers: int) -> tuple[int | None, ...]:
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in kinds):
        fields.refuse("layer_types", f"must name one of {list(known)} for each of {layers} layers", "mend the config")
    if "sliding_attention" in kinds and window is None:
        fields.refuse("layer_types", "names sliding layers but no sliding_window is in use", "set a sliding window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtype(fields: Fields) -> str | None:
    name = fields.raw.get("dtype", fields.raw.get("torch_dtype"))
    if name is None:
        return None
    name = str(name).removeprefix("torch.")
    if name not in WEIGHT_DTYPES:
        fields.refuse("dtype", f"{name!r} is not served", f"use one of {', '.join(WEIGHT_DTYPES)}")
    return name
