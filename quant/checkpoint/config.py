"""What a model folder's config.json says, checked and put into one shape.

Reads the spellings of transformers 4 (`torch_dtype`, `rope_theta`, `rope_scaling`) and 5 (`dtype`, `rope_parameters`).
A key that is left out has the value that the family's config class in transformers gives it. Whatever would be computed
wrongly is refused here, by file, key and remedy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from quant.checkpoint.errors import short
from quant.checkpoint.fields import Fields, read_json
from quant.checkpoint.rope import RopeConfig, context_limit, parse_rope

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

CONFIG: Final = "config.json"
WEIGHT_DTYPES: Final = ("float32", "bfloat16", "float16")
MAX_LAYERS: Final = 1024
SLIDING_WINDOW: Final = 4096  # positions, where a family with windows states none
FULL_LAYERS: Final = 28  # of Qwen: layers before the first with a window


@dataclass(frozen=True, slots=True, kw_only=True)
class _FamilyRules:
    """What differs between the families. None as `kv_heads` or `head_dim`: derived from other sizes."""

    family: Family
    max_positions: int
    kv_heads: int | None = None
    head_dim: int | None = None
    attention_bias: bool = False  # whether the config may switch on biases of all four projections
    qkv_bias: bool = False  # whether queries, keys and values always have one
    mlp_bias: bool = False  # whether the config may switch it on
    qk_norm: bool = False


FAMILIES: Final = {
    "LlamaForCausalLM": _FamilyRules(family="llama", max_positions=2048, attention_bias=True, mlp_bias=True),
    "MistralForCausalLM": _FamilyRules(family="mistral", max_positions=131072, kv_heads=8),
    "Qwen2ForCausalLM": _FamilyRules(family="qwen2", max_positions=32768, kv_heads=32, qkv_bias=True),
    "Qwen3ForCausalLM": _FamilyRules(
        family="qwen3", max_positions=32768, kv_heads=32, head_dim=128, attention_bias=True, qk_norm=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one model. Sizes count elements."""

    architecture: str
    family: Family
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
    qk_norm: bool
    windows: tuple[int | None, ...]  # one a layer: how many positions back it sees, itself included; None: all
    rope: RopeConfig
    dtype: str | None  # of the checkpoint, as it says

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.windows)


def load_config(folder: Path) -> ModelConfig:
    """Reads and checks the config of a model folder or of a GGUF file. Raises BadFile."""
    return parse_config(read_config(folder), str(folder / CONFIG))


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the `config.json` of a model folder, unchecked, or its equivalent made from a GGUF file's metadata.
    Raises BadFile."""
    from quant.checkpoint.gguf.file import gguf_file, is_gguf  # imported here because that module imports this one

    if is_gguf(folder):
        found: dict[str, Any] = json.loads(gguf_file(folder).texts[CONFIG])
        return found
    return read_json(folder / CONFIG, "give the folder that holds the model's config.json")


def parse_config(raw: dict[str, Any], file: str) -> ModelConfig:
    """Checks the parsed config; `file` is for messages."""
    fields = Fields(raw, file)
    architecture = _architecture(fields)
    rules = FAMILIES[architecture]
    heads = fields.integer("num_attention_heads", minimum=1)
    hidden = fields.integer("hidden_size", minimum=1)
    head_dim = _head_dim(fields, rules, hidden, heads)
    _refuse_unknown_computation(fields)
    attention_bias = _switch(fields, "attention_bias", rules.attention_bias, architecture)
    max_positions = fields.integer("max_position_embeddings", default=rules.max_positions, minimum=1)
    rope = parse_rope(fields, head_dim, max_positions)
    return ModelConfig(
        architecture=architecture,
        family=rules.family,
        vocab_size=_vocabulary(fields),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", minimum=1),
        heads=heads,
        kv_heads=_kv_heads(fields, rules, heads),
        head_dim=head_dim,
        norm_eps=fields.within("rms_norm_eps", 0.0, 1.0, default=1e-6),
        max_context=context_limit(max_positions, rope),
        tied_head=fields.boolean("tie_word_embeddings", default=False),
        qkv_bias=attention_bias or rules.qkv_bias,
        output_bias=attention_bias,
        mlp_bias=_switch(fields, "mlp_bias", rules.mlp_bias, architecture),
        qk_norm=rules.qk_norm,
        windows=_windows(fields, rules.family),
        rope=rope,
        dtype=_dtype(fields),
    )


def _architecture(fields: Fields) -> str:
    names = fields.raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in FAMILIES:
        fields.refuse("architectures", f"{name!r} is not served", f"use one of {', '.join(FAMILIES)}")
    return name


def _vocabulary(fields: Fields) -> int:
    size = fields.integer("vocab_size", minimum=1)
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


def _refuse_unknown_computation(fields: Fields) -> None:
    act = fields.raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        fields.refuse("hidden_act", f"{act!r} is not served", "use a model with silu")
    for key in ("num_local_experts", "num_experts", "attn_logit_softcapping", "final_logit_softcapping"):
        if fields.raw.get(key):
            fields.refuse(key, "is not served", "use a dense model without it")
    for key, neutral in (("logit_scale", 1.0), ("residual_multiplier", 1.0), ("embedding_multiplier", 1.0)):
        if fields.number(key, default=neutral) != neutral:
            fields.refuse(key, "is not served", f"use a model where it is {neutral}")


def _windows(fields: Fields, family: Family) -> tuple[int | None, ...]:
    layers = fields.integer("num_hidden_layers", minimum=1, maximum=MAX_LAYERS)
    if family == "llama":
        return (None,) * layers
    window = fields.raw.get("sliding_window", SLIDING_WINDOW)
    if window is not None:
        window = fields.integer("sliding_window", default=SLIDING_WINDOW, minimum=1)
    if family == "mistral":
        if fields.raw.get("layer_types") is not None:
            fields.refuse("layer_types", "MistralForCausalLM has one window for all layers", "remove the key")
        return (window,) * layers
    if not fields.boolean("use_sliding_window", default=False):
        window = None
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", default=FULL_LAYERS, minimum=0)
        return tuple(window if index >= first else None for index in range(layers))
    return _windows_of_kinds(fields, kinds, window, layers)


def _windows_of_kinds(fields: Fields, kinds: object, window: int | None, layers: int) -> tuple[int | None, ...]:
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in kinds):
        fields.refuse("layer_types", f"must name one of {list(known)} for each of {layers} layers", "mend the config")
    if "sliding_attention" in kinds and window is None:
        fields.refuse("layer_types", "names sliding layers but no sliding_window is in use", "set use_sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtype(fields: Fields) -> str | None:
    name = fields.raw.get("dtype", fields.raw.get("torch_dtype"))
    if name is None:
        return None
    name = str(name).removeprefix("torch.")
    if name not in WEIGHT_DTYPES:
        fields.refuse("dtype", f"{name!r} is not served", f"use one of {', '.join(WEIGHT_DTYPES)}")
    return name
