"""Converts a GGUF file's metadata to config.json and generation_config.json. Faults name the key. Needs no torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from quant.checkpoint.config import MAX_LAYERS, PATTERN
from quant.checkpoint.errors import MEND, short
from quant.checkpoint.fields import Fields
from quant.checkpoint.gguf.names import OUTPUT, ROPE_FACTORS
from quant.checkpoint.rope import MOST_THETA, THETA, THETA_OF_FULL

OTHER_MODEL: Final = "take another model"
CONTEXT_OF_LLAMA3: Final = 8192  # tokens; Llama 3's training context before its RoPE was scaled
LOW, HIGH = 1.0, 4.0  # rotations in that context between which Llama 3 ramps the scaling
LAYERS_OF_GEMMA3_27B: Final = 62  # the one size whose attention is not scaled by the size of a head
_FACTOR_TOLERANCE: Final = 1e-4


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """Names an architecture as transformers does, and its differences in a GGUF file."""

    architecture: str
    model_type: str
    paired_rows: bool = False  # whether rows of a head's two halves alternate, as llama.cpp's RoPE expects
    pre: str | None = None  # pre-tokenizer to use if an old file names none


FAMILIES: Final = {
    "llama": GgufFamily("LlamaForCausalLM", "llama", paired_rows=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2", pre="qwen2"),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3", pre="qwen2"),
    "gemma3": GgufFamily("Gemma3ForCausalLM", "gemma3_text"),
    "granite": GgufFamily("GraniteForCausalLM", "granite", paired_rows=True),
}
_MISTRAL: Final = GgufFamily("MistralForCausalLM", "mistral", paired_rows=True)
_READ: Final = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scale_linear",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
_NEUTRAL: Final = {
    "attention.causal": True,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
}
_MULTIPLIERS: Final = {  # of Granite, under the names of its config; the file's scale of logits divides, as that does
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}
_COMPUTED: Final = (
    "attention.",
    "rope.",
    "expert",
    "logit",
    "residual",
    "embedding_scale",
    "attn_logit",
    "final_logit",
)


@dataclass(frozen=True, slots=True)
class Positions:
    """Holds what the config takes from the table of tensors rather than from the metadata."""

    names: Collection[str]  # the names of all tensors
    rows: int  # rows of the embedding
    dtype: str  # type that a folder would give for the weights
    factors: tuple[float, ...] = ()  # RoPE wavelength factors, one per pair of a head's numbers


def family_of(fields: Fields) -> GgufFamily:
    """Returns the family of the file's architecture. Raises BadFile if the architecture is not served or the file is
    not a whole language model."""
    kind = _text(fields, "general.type", "model")
    if kind != "model":
        fields.refuse("general.type", f"{short(kind)} is no language model", "give the file of the model")
    if fields.integer("split.count", default=1) > 1:
        remedy = "join the parts: llama-gguf-split --merge FIRST_PART FILE"
        fields.refuse("split.count", "this is one part of several", remedy)
    name = _text(fields, "general.architecture")
    if name not in FAMILIES:
        fields.refuse("general.architecture", f"{short(name)} is not served", f"use one of {', '.join(FAMILIES)}")
    windowed = fields.raw.get(f"{name}.attention.sliding_window")
    return _MISTRAL if name == "llama" and windowed else FAMILIES[name]


def config_of(fields: Fields, family: GgufFamily, positions: Positions) -> dict[str, Any]:
    """Builds the contents of config.json. Raises BadFile."""
    own = f"{_text(fields, 'general.architecture')}."
    multipliers = _MULTIPLIERS if family.model_type == "granite" else {}
    _refuse_unknown(fields, own, multipliers)
    if multipliers and not fields.boolean(f"{own}rope.scaling.finetuned", default=True):
        fields.refuse(f"{own}rope.scaling.finetuned", "heads that are not rotated are not served", OTHER_MODEL)
    hidden = fields.integer(f"{own}embedding_length", minimum=1)
    heads = fields.integer(f"{own}attention.head_count", minimum=1)
    head_dim = _head_dim(fields, own, hidden, heads)
    context = fields.integer(f"{own}context_length", minimum=1)
    scaling = _scaling(fields, own, positions, head_dim)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": positions.rows,
        "hidden_size": hidden,
        "intermediate_size": fields.integer(f"{own}feed_forward_length", minimum=1),
        "num_hidden_layers": fields.integer(f"{own}block_count", minimum=1, maximum=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(fields, own, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": shortest(fields.within(f"{own}attention.layer_norm_rms_epsilon", 0.0, 1.0)),
        "rope_theta": shortest(fields.within(f"{own}rope.freq_base", 1.0, MOST_THETA, default=THETA)),
        "rope_scaling": scaling,
        "tie_word_embeddings": OUTPUT not in positions.names,
        "torch_dtype": positions.dtype,
    }
    if family.model_type == "gemma3_text":
        return config | _gemma3(fields, own, config)
    stated = {name: shortest(fields.number(f"{own}{key}")) for key, name in multipliers.items()}
    return config | _biases(family, positions.names) | _windows(fields, own, family) | stated


def shortest(number: float) -> float:
    """Returns the shortest decimal number with the same float32 value, since GGUF files store numbers as float32."""
    kept = struct.pack("<f", number)
    digits = (float(f"{number:.{count}g}") for count in range(6, 10))
    return next((one for one in digits if struct.pack("<f", one) == kept), number)


def sampling_of(fields: Fields) -> dict[str, Any]:
    """Builds the sampling settings of generation_config.json; returns an empty dict if the file has none."""
    found: dict[str, Any] = {}
    for key, name in (
        ("temp", "temperature"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("penalty_repeat", "repetition_penalty"),
    ):
        if fields.raw.get(f"general.sampling.{key}") is not None:
            found[name] = shortest(fields.number(f"general.sampling.{key}"))
    if fields.raw.get("general.sampling.top_k") is not None:
        found["top_k"] = fields.integer("general.sampling.top_k")
    return {"do_sample": found.get("temperature", 1.0) > 0.0, **found} if found else {}


def _text(fields: Fields, key: str, default: str | None = None) -> str:
    value = fields.raw.get(key, default)
    if not isinstance(value, str):
        fields.refuse(key, "is missing" if value is None else "must be a text", MEND)
    return value


def _refuse_unknown(fields: Fields, own: str, known: Collection[str]) -> None:
    """Refuses every key that would make llama.cpp compute differently from this engine."""
    for key, value in fields.raw.items():
        part = key.removeprefix(own)
        if part == key or not part.startswith(_COMPUTED) or part in _READ or part in known:
            continue
        if part not in _NEUTRAL or value != _NEUTRAL[part]:
            fields.refuse(key, f"{short(value)} is not served", OTHER_MODEL)


def _kv_heads(fields: Fields, own: str, heads: int) -> int:
    kv_heads = fields.integer(f"{own}attention.head_count_kv", default=heads, minimum=1)
    if heads % kv_heads:
        fields.refuse(f"{own}attention.head_count_kv", f"{heads} heads do not divide among {kv_heads}", MEND)
    return kv_heads


def _head_dim(fields: Fields, own: str, hidden: int, heads: int) -> int:
    """Returns the size of a head. Refuses RoPE on a part of a head, and values of another size than keys."""
    if fields.raw.get(f"{own}attention.key_length") is None and hidden % heads:
        fields.refuse(f"{own}embedding_length", f"{hidden} does not divide among {heads} heads", MEND)
    head_dim = fields.integer(f"{own}attention.key_length", default=hidden // heads, minimum=2)
    for key in ("attention.value_length", "rope.dimension_count"):
        other = fields.integer(f"{own}{key}", default=head_dim)
        if other != head_dim:
            fields.refuse(f"{own}{key}", f"{other} is not served beside heads of {head_dim}", OTHER_MODEL)
    return head_dim


def _biases(family: GgufFamily, names: Collection[str]) -> dict[str, bool]:
    """Returns the config's switches for biases, in the families that have them."""
    if family.model_type not in ("llama", "granite", "qwen3"):
        return {}
    found = {"attention_bias": "blk.0.attn_q.bias" in names}
    return found if family.model_type == "qwen3" else found | {"mlp_bias": "blk.0.ffn_gate.bias" in names}


def _windows(fields: Fields, own: str, family: GgufFamily) -> dict[str, Any]:
    window = fields.integer(f"{own}attention.sliding_window", default=0)
    if family.model_type == "mistral":
        return {"sliding_window": window}
    if window:
        fields.refuse(f"{own}attention.sliding_window", "is not served in this family", OTHER_MODEL)
    return {"use_sliding_window": False} if family.model_type.startswith("qwen") else {}


def _gemma3(fields: Fields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a config of Gemma 3 states beyond those of other families. llama.cpp knows the rest by the family's
    name."""
    hidden, heads, scalar = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    if config["num_hidden_layers"] == LAYERS_OF_GEMMA3_27B:
        scalar = hidden // heads
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": fields.integer(f"{own}attention.sliding_window", minimum=1),
        "sliding_window_pattern": PATTERN,
        "rope_theta": shortest(fields.within(f"{own}rope.freq_base", 1.0, MOST_THETA, default=THETA_OF_FULL)),
        "rope_local_base_freq": shortest(fields.within(f"{own}rope.freq_base_swa", 1.0, MOST_THETA, default=THETA)),
    }


def _scaling(fields: Fields, own: str, positions: Positions, head_dim: int) -> dict[str, Any] | None:
    """Returns the config's `rope_scaling`, or None if RoPE is not scaled."""
    kind = _text(fields, f"{own}rope.scaling.type", "none")
    old = fields.number(f"{own}rope.scale_linear", default=1.0)
    factor = fields.number(f"{own}rope.scaling.factor", default=old)
    if ROPE_FACTORS in positions.names:
        if kind not in ("none", "llama3") and factor != 1.0:
            fields.refuse(f"{own}rope.scaling.type", f"{short(kind)} is not served beside {ROPE_FACTORS}", OTHER_MODEL)
        return _llama3(fields, own, positions.factors, head_dim)
    if kind not in ("none", "linear", "yarn"):
        fields.refuse(f"{own}rope.scaling.type", f"{short(kind)} is not served", OTHER_MODEL)
    if kind == "yarn":
        return _yarn(fields, own, factor)
    return {"rope_type": "linear", "factor": shortest(factor)} if kind == "linear" or factor != 1.0 else None


def _yarn(fields: Fields, own: str, factor: float) -> dict[str, Any]:
    section: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": shortest(factor),
        "original_max_position_embeddings": fields.integer(f"{own}rope.scaling.original_context_length", minimum=1),
    }
    for name in ("beta_fast", "beta_slow"):
        if fields.raw.get(f"{own}rope.scaling.yarn_{name}") is not None:
            section[name] = shortest(fields.number(f"{own}rope.scaling.yarn_{name}"))
    return section


def _llama3(fields: Fields, own: str, factors: tuple[float, ...], head_dim: int) -> dict[str, Any] | None:
    """Recovers the Llama 3 settings of `rope_scaling` from the factors computed from them, which are all that a GGUF
    file stores. Returns None if the factors scale nothing; refuses factors that no such settings give."""
    if len(factors) != head_dim // 2 or not all(1.0 <= one <= 1024.0 for one in factors):
        fields.refuse(ROPE_FACTORS, f"must hold {head_dim // 2} numbers from 1 to 1024", MEND)
    if max(factors) == 1.0:
        return None
    theta = fields.within(f"{own}rope.freq_base", 1.0, MOST_THETA, default=THETA)
    original = fields.integer(f"{own}rope.scaling.original_context_length", default=CONTEXT_OF_LLAMA3, minimum=1)
    found: Mapping[str, Any] = {
        "rope_type": "llama3",
        "factor": shortest(max(factors)),
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": original,
    }
    for index, factor in enumerate(factors):
        turns = original * theta ** (-2 * index / head_dim) / (2 * math.pi)
        kept = min(1.0, max(0.0, (turns - LOW) / (HIGH - LOW)))
        expected = 1.0 / ((1 - kept) / max(factors) + kept)
        if abs(factor / expected - 1) > _FACTOR_TOLERANCE:
            fields.refuse(ROPE_FACTORS, f"stretches positions otherwise than Llama 3 (number {index})", OTHER_MODEL)
    return dict(found)
