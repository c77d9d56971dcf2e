"""Tiny models on which executors are compared with eager: each the smallest that the executor's kernels read."""

from __future__ import annotations

from collections.abc import Mapping

PLAIN: Mapping[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
KERNELS: Mapping[str, object] = {
    **PLAIN,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}
