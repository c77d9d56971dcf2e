"""Trained weights as the model folder Hugging Face would write; bf16, safetensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from models.train.chat import END, END_OF_TEXT
from models.train.network import Qwen3, Shape
from models.train.tokenizer import special_id

WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_weights(net: Qwen3, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in net.state_dict().items()}
    save_file(weights, path, metadata={"format": "pt"})


def read_network(path: Path, shape: Shape, device: torch.device) -> Qwen3:
    """The bf16 weights of `path` in float32 parameters."""
    net = Qwen3(shape)
    net.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    return net.to(device).eval()


def write_folder(folder: Path, weights: Path, tokenizer_folder: Path, shape: Shape) -> None:
    """All files but the card. The weights are copied as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(weights, folder / WEIGHTS_FILE)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_folder / name, folder / name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end, end_of_text = special_id(tokenizer, END), special_id(tokenizer, END_OF_TEXT)
    _write_json(folder / "config.json", config(shape, end, end_of_text))
    _write_json(folder / "generation_config.json", generation_config(end, end_of_text))


def config(shape: Shape, end: int, end_of_text: int) -> dict[str, object]:
    """`rope_theta` and `torch_dtype` are how transformers 4 spells what `rope_parameters` and `dtype` say."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": end,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "layer_types": ["full_attention"] * shape.layers,
        "max_position_embeddings": shape.max_positions,
        "max_window_layers": shape.layers,
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": end_of_text,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocabulary,
    }


def generation_config(end: int, end_of_text: int) -> dict[str, object]:
    return {
        "do_sample": True,
        "eos_token_id": [end, end_of_text],
        "pad_token_id": end_of_text,
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.95,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
