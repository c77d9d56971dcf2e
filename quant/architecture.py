"""What config.json says of a decoder-only model: Llama, Mistral, Qwen2 and Qwen3, in transformers 4 and 5 spelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from quant.errors import BadConfig, UnsupportedFormat
from quant.rope import RopeRule

_FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_NUMBERS: Final = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)

Config = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes and switches of one model. windows: for each layer how many positions it sees, None for all."""

    family: str
    vocab: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    positions: int
    rope: RopeRule
    windows: tuple[int | None, ...]
    tied: bool

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def kept_bytes(self) -> int:
        """Keys and values of one position, in float32."""
        return 4 * 2 * self.layers * self.kv_heads * self.head_dim

    def linears(self) -> Mapping[str, tuple[int, int]]:
        """Every linear of a layer, in the order of the forward pass: name -> (inputs, outputs)."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (self.hidden, queries),
            "self_attn.k_proj": (self.hidden, keys),
            "self_attn.v_proj": (self.hidden, keys),
            "self_attn.o_proj": (queries, self.hidden),
            "mlp.gate_proj": (self.hidden, self.mlp),
            "mlp.up_proj": (self.hidden, self.mlp),
            "mlp.down_proj": (self.mlp, self.hidden),
        }

    def norms(self) -> Mapping[str, int]:
        """Every norm of a layer: name -> size."""
        norms = {"input_layernorm": self.hidden, "post_attention_layernorm": self.hidden}
        if self.family == "qwen3":
            norms |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        return norms


def read_architecture(config: Config) -> Architecture:
    family = str(config.get("model_type"))
    if family not in _FAMILIES:
        raise UnsupportedFormat(f"model type {family[:40]!r}", f"use one of {', '.join(_FAMILIES)}")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedFormat(f"activation {str(config.get('hidden_act'))[:40]!r}", "use a model with silu")
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise BadConfig("num_key_value_heads", f"a divisor of {heads}", kv_heads)
    head_dim = _count(config, "head_dim", hidden // heads)
    if head_dim % 2:
        raise BadConfig("head_dim", "an even number", head_dim)
    positions = _count(config, "max_position_embeddings", 2048)
    return Architecture(
        family=family,
        vocab=_count(config, "vocab_size"),
        hidden=hidden,
        mlp=_count(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=_number(config, "rms_norm_eps", 1e-6),
        positions=positions,
        rope=_rope(config, positions),
        windows=_windows(config, family, _count(config, "num_hidden_layers")),
        tied=config.get("tie_word_embeddings", False) is True,
    )


def _rope(config: Config, positions: int) -> RopeRule:
    section = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(section, Mapping) or any(isinstance(value, Mapping) for value in section.values()):
        raise BadConfig("rope_parameters", "one rule for all layers", section)
    theta = _number(section, "rope_theta", _number(config, "rope_theta", 10000.0))
    kind = section.get("rope_type", section.get("type", "default"))
    values = {name: _number(section, name, 0.0) for name in _ROPE_NUMBERS if section.get(name) is not None}
    trained = _count(section, "original_max_position_embeddings", positions)
    if str(kind) == "yarn" and "factor" not in values:
        values["factor"] = positions / trained
    return RopeRule(str(kind), theta, values, trained)


def _windows(config: Config, family: str, layers: int) -> tuple[int | None, ...]:
    size = config.get("sliding_window")
    if family == "llama" or size is None or (family != "mistral" and config.get("use_sliding_window") is not True):
        return (None,) * layers
    window = _count(config, "sliding_window")
    if family == "mistral":
        return (window,) * layers
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise BadConfig("layer_types", f"a list of {layers}", kinds)
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    full = _count(config, "max_window_layers", 28, least=0)
    return tuple(None if layer < full else window for layer in range(layers))


def _count(config: Config, field: str, default: int | None = None, least: int = 1) -> int:
    value = config.get(field)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 1 << 31:
        raise BadConfig(field, f"an integer of {least} or more", value)
    return value


def _number(config: Config, field: str, default: float) -> float:
    value = config.get(field)
    if value is None:
        return default
    if not isinstance(value, int | float):
        raise BadConfig(field, "a number", value)
    return float(value)
