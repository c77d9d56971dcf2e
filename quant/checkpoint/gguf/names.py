"""Maps names of tensors in a GGUF file to those in a model folder and back. Needs no torch."""

from __future__ import annotations

import re
from typing import Final

from quant.checkpoint.tensors import EMBEDDING, FINAL_NORM, HEAD

ROPE_FACTORS: Final = "rope_freqs.weight"  # a folder has no such tensor: its config implies the factors
OUTPUT: Final = "output.weight"
TOKENS: Final = "token_embd.weight"
_WHOLE: Final = {TOKENS: EMBEDDING, "output_norm.weight": FINAL_NORM, OUTPUT: f"{HEAD}.weight"}
_PARTS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# The same, in a model that also normalises what attention and MLP compute.
_PARTS_OF_OUTPUT_NORMS: Final = _PARTS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_LAYER: Final = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z_]+)\.(weight|bias)", re.ASCII)


def folder_name(name: str, *, output_norms: bool) -> str | None:
    """Returns a tensor's name in a model folder, or None if no such model has such a tensor."""
    if name in _WHOLE:
        return _WHOLE[name]
    found, parts = _OF_LAYER.fullmatch(name), _PARTS_OF_OUTPUT_NORMS if output_norms else _PARTS
    if found is None or found[2] not in parts:
        return None
    return f"model.layers.{found[1]}.{parts[found[2]]}.{found[3]}"


def file_name(name: str, *, output_norms: bool) -> str:
    """Returns the name in a GGUF file of a tensor with this name in a folder. Used in error texts."""
    whole = {folder: file for file, folder in _WHOLE.items()}
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, suffix = rest.rpartition(".")
    parts = _PARTS_OF_OUTPUT_NORMS if output_norms else _PARTS
    return f"blk.{layer}.{ {folder: file for file, folder in parts.items()}[part] }.{suffix}"
