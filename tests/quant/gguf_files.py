"""Tiny models as GGUF files, written with the writer of the `gguf` package as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TOKENS = 320
SIZES: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama3-rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
    "mistral": {"sliding_window": 9},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"attention_bias": False},
    "gemma3": {"sliding_window": 9, "rope_theta": 1e6, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1,
        "logits_scaling": 3.0,
        "tie_word_embeddings": True,
    },
}
OUTPUT_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Where a block has its float16 numbers: others than small ones would be infinite, or no numbers.
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}


def model_type(family: str) -> str:
    return {"gemma3": "gemma3_text"}.get(family, "llama" if family.startswith("llama") else family)


def config_of(family: str, **more: Any) -> dict[str, Any]:
    return deepcopy({**SIZES, **FAMILIES[family], **more})


def blocks(kind: str, shape: tuple[int, int], seed: int, spread: float = 1.0) -> np.ndarray:
    """Random blocks of any kind, as bytes [rows, bytes a row]."""
    made = np.random.default_rng(seed)
    values, nbytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = made.integers(0, 256, (shape[0], shape[1] // values, nbytes), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = (made.normal(size=raw.shape[:2]) * spread).astype(np.float16)
        raw[..., at : at + 2] = halves[..., None].view(np.uint8)
    return raw.reshape(shape[0], -1)


def write_model(
    path: Path, family: str, kinds: Mapping[str, str] | str = "F32", **more: Any
) -> dict[str, torch.Tensor]:
    """A random model; gives its tensors as transformers names them, as what their blocks hold. kinds: of matrices, by
    a part of their names in the file; what none names is F32."""
    config = config_of(family, **more)
    writer = begun(path, family, config)
    held: dict[str, torch.Tensor] = {}
    torch.manual_seed(len(family))
    for name, shape in shapes(family, config).items():
        kind = kinds if isinstance(kinds, str) else next((k for part, k in kinds.items() if part in name), "F32")
        kind = kind if len(shape) == 2 else "F32"
        data, plain = numbers(kind, shape, name)
        held[name] = torch.from_numpy(plain.copy())
        if family.startswith(("llama", "mistral", "granite")) and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            data = by_turns(data, heads)
        if family == "gemma3" and name.endswith("norm.weight"):
            data = data + np.float32(1)  # as the converter does
        add(writer, file_name(name, family), data, kind)
    if "rope_scaling" in config and config["rope_scaling"]["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", factors(config))
    finish(writer)
    return held


def numbers(kind: str, shape: tuple[int, ...], name: str) -> tuple[np.ndarray, np.ndarray]:
    """As they stand in the file, and as float32."""
    if kind in ("Q4_K", "Q6_K"):
        raw = blocks(kind, (shape[0], shape[1]), sum(name.encode()), 2e-3 / 16)
        return raw, gguf.dequantize(raw, GGMLQuantizationType[kind])
    noise = torch.randn(shape).numpy()
    plain = noise / shape[1] ** 0.5 * 1.5 if len(shape) == 2 else np.abs(noise) * 0.2 + 0.9
    plain = plain if not name.endswith(".bias") else noise * 0.1
    data = gguf.quantize(plain.astype(np.float32), GGMLQuantizationType[kind])
    return data, gguf.dequantize(data, GGMLQuantizationType[kind]).reshape(shape)


def shapes(family: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of every tensor, by the names of transformers' own model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own = AutoConfig.for_model(model_type(family), **deepcopy(dict(config)))  # which writes into what it is given
    with torch.device("meta"):
        found = AutoModelForCausalLM.from_config(own).state_dict()
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    return {name: tuple(tensor.shape) for name, tensor in found.items() if name not in tied}


def file_name(name: str, family: str = "llama") -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    names = NAMES | OUTPUT_NORMS if family == "gemma3" else NAMES
    return f"blk.{layer}.{names[part]}.{suffix}"


def by_turns(data: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp rotates them: the two halves of each head by turns."""
    return data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)


def factors(config: Mapping[str, Any]) -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3."""
    scaling, dim = config["rope_scaling"], config["head_dim"]
    found = []
    for pair in range(dim // 2):
        length = 2 * np.pi * config["rope_theta"] ** (2 * pair / dim)
        original, low, high = (
            scaling[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        if length < original / high:
            found.append(1.0)
        elif length > original / low:
            found.append(scaling["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            found.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(found, dtype=np.float32)


def begun(path: Path, family: str, config: Mapping[str, Any], tokenizer: bool = True) -> GGUFWriter:
    """A writer that has the metadata of such a model."""
    writer = GGUFWriter(path, "llama" if family.startswith(("llama", "mistral")) else family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if family == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if tokenizer:
        add_tokenizer(writer, small_tokenizer(), "qwen2" if family.startswith("qwen") else "gpt-2")
    return writer


def small_tokenizer() -> Tokenizer:
    """Pairs of bytes, cut as GPT-2 cuts them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    text = "the quick brown fox jumps over the lazy dog and the cat sat on the mat with another fox in there"
    tokenizer.train_from_iterator([text, *text.split()], trainer)
    return tokenizer


def add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, pre: str | None) -> None:
    import json

    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    special = tokenizer.get_added_tokens_decoder()
    kinds = [1 if number not in special else 3 if special[number].special else 4 for number in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ")


def add(writer: GGUFWriter, name: str, data: np.ndarray, kind: str) -> None:
    if kind in ("F32", "F16"):
        writer.add_tensor(name, np.ascontiguousarray(data))
    else:
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=GGMLQuantizationType[kind])


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
