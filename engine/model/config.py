"""What a model folder's config.json says, checked and put into one shape. Torch-free.

Reads the spellings of transformers 4 (`torch_dtype`, `rope_theta`, `rope_scaling`) and 5 (`dtype`, `rope_parameters`).
Whatever would be computed wrongly is refused here, by file, key and remedy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.model.fields import Fields, read_json
from engine.model.rope_config import RopeConfig, context_limit, parse_rope

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
MAX_LAYERS = 1024


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
    """Reads `config.json` of a model folder. Raises InvalidModel."""
    path = folder / "config.json"
    return parse_config(read_json(path, "give the folder that holds the model's config.json"), str(path))


def parse_config(raw: dict[str, Any], file: str) -> ModelConfig:
    """Checks the parsed config; `file` is for messages."""
    fields = Fields(raw, file)
    architecture, family = _architecture(fields)
    heads = fields.integer("num_attention_heads", minimum=1)
    hidden = fields.integer("hidden_size", minimum=1)
    kv_heads = fields.integer("num_key_value_heads", default=8 if family == "mistral" else heads, minimum=1)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"{heads} heads do not divide among {kv_heads}", "mend the config")
    head_dim = _head_dim(fields, family, hidden, heads)
    _refuse_unknown_computation(fields)
    attention_bias = fields.boolean("attention_bias", default=False)
    if family in ("mistral", "qwen2") and attention_bias:
        fields.refuse("attention_bias", f"{architecture} has none to switch on", "remove the key")
    rope = parse_rope(fields, head_dim)
    return ModelConfig(
        architecture=architecture,
        family=family,
        vocab_size=fields.integer("vocab_size", minimum=1),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", minimum=1),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        max_context=context_limit(fields.integer("max_position_embeddings", minimum=1), rope),
        tied_head=fields.boolean("tie_word_embeddings", default=False),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=_mlp_bias(fields, family),
        qk_norm=family == "qwen3",
        windows=_windows(fields, family),
        rope=rope,
        dtype=_dtype(fields),
    )


def _architecture(fields: Fields) -> tuple[str, Family]:
    names = fields.raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in FAMILIES:
        fields.refuse("architectures", f"{name!r} is not served", f"use one of {', '.join(FAMILIES)}")
    return name, FAMILIES[name]


def _head_dim(fields: Fields, family: Family, hidden: int, heads: int) -> int:
    if fields.raw.get("head_dim") is None:
        # Qwen3 alone fixes a default of its own.
        if family == "qwen3":
            return 128
        if hidden % heads:
            fields.refuse("hidden_size", f"{hidden} does not divide among {heads} heads", "state head_dim")
        return hidden // heads
    return fields.integer("head_dim", minimum=2)


def _mlp_bias(fields: Fields, family: Family) -> bool:
    bias = fields.boolean("mlp_bias", default=False)
    if bias and family != "llama":
        fields.refuse("mlp_bias", f"the {family} family has none to switch on", "remove the key")
    return bias


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
    window = fields.raw.get("sliding_window", 4096)
    if window is not None:
        window = fields.integer("sliding_window", default=4096, minimum=1)
    if family == "mistral":
        if fields.raw.get("layer_types") is not None:
            fields.refuse("layer_types", "MistralForCausalLM has one window for all layers", "remove the key")
        return (window,) * layers
    if not fields.boolean("use_sliding_window", default=False):
        window = None
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", default=28, minimum=0)
        return tuple(window if index >= first else None for index in range(layers))
    return _windows_of_kinds(fields, kinds, window, layers)


def _windows_of_kinds(fields: Fields, kinds: object, window: int | None, layers: int) -> tuple[int | None, ...]:
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in kinds):
        fields.refuse("layer_types", f"must name one of {sorted(known)} for each of {layers} layers", "mend the config")
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
