"""Names and shapes of the tensors that a model of one config has, as Hugging Face names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from quant.checkpoint.config import ModelConfig

EMBEDDING: Final = "model.embed_tokens.weight"
FINAL_NORM: Final = "model.norm.weight"
HEAD: Final = "lm_head"

Shapes = dict[str, tuple[int, ...]]


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}"


def layer_linears(config: ModelConfig) -> Mapping[str, tuple[int, int]]:
    """The linears of a layer in the order of the forward pass: name -> (inputs, outputs)."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }


def has_bias(config: ModelConfig, linear: str) -> bool:
    """Whether a linear of `layer_linears` has a bias."""
    if linear.startswith("mlp."):
        return config.mlp_bias
    return config.output_bias if linear == "self_attn.o_proj" else config.qkv_bias


def layer_norms(config: ModelConfig) -> Mapping[str, int]:
    norms = {"input_layernorm": config.hidden_size, "post_attention_layernorm": config.hidden_size}
    if config.output_norms:
        norms |= {"pre_feedforward_layernorm": config.hidden_size, "post_feedforward_layernorm": config.hidden_size}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    return norms


def mlp_norm(config: ModelConfig) -> str:
    """Returns the name of the norm whose output the MLP reads."""
    return "pre_feedforward_layernorm" if config.output_norms else "post_attention_layernorm"


def linears(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """Every linear, an untied head last: full name, (inputs, outputs), whether it has a bias."""
    for index in range(config.layers):
        for name, shape in layer_linears(config).items():
            yield f"{layer_prefix(index)}.{name}", shape, has_bias(config, name)
    if not config.tied_head:
        yield HEAD, (config.hidden_size, config.vocab_size), False


def plain_tensors(config: ModelConfig) -> Shapes:
    """Names what no format quantizes: embedding and norms."""
    found: Shapes = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for index in range(config.layers):
        found |= {f"{layer_prefix(index)}.{name}.weight": (size,) for name, size in layer_norms(config).items()}
    found[FINAL_NORM] = (config.hidden_size,)
    return found


def dense_tensors(config: ModelConfig) -> Shapes:
    found = plain_tensors(config)
    for name, (inputs, outputs), bias in linears(config):
        found[f"{name}.weight"] = (outputs, inputs)
        if bias:
            found[f"{name}.bias"] = (outputs,)
    return found
