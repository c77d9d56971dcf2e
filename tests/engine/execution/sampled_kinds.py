"""A small model for a GPU, and all kinds of parameters that rows of it are sampled by."""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace

from engine.api import GREEDY, GenerationRequest, Stopping

VOCABULARY = 5000
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
PLAIN = replace(GREEDY, seed=3)
KINDS = [
    replace(PLAIN, temperature=0.8, top_k=50, top_p=0.95),
    PLAIN,
    replace(PLAIN, temperature=0.9, seed=11),
    replace(PLAIN, temperature=1.1, top_p=0.9, seed=(1 << 64) - 1),
    replace(PLAIN, repetition_penalty=1.3, frequency_penalty=0.4),
    replace(PLAIN, temperature=0.7, min_p=0.05, presence_penalty=0.5, logit_bias=((7, 6.0), (9, -50.0))),
    replace(PLAIN, temperature=1.0, top_k=2000, frequency_penalty=-0.2),
    replace(PLAIN, logit_bias=tuple((token, 3.0) for token in range(0, 300))),
]
GAP = 0.15  # in logits, which reach 8: what bf16 may differ by


def one_of_each(tokens: int) -> list[GenerationRequest]:
    """A request of each kind, with prompts of many lengths."""
    generator = torch.Generator().manual_seed(1)
    return [
        GenerationRequest(
            request_id=str(key),
            token_ids=tuple(torch.randint(0, VOCABULARY, (9 * key + 1,), generator=generator).tolist()),
            sampling=kind,
            stopping=Stopping(max_tokens=tokens, min_tokens=20 if key % 2 else 0, stop_token_ids=(4999,)),
            arrived_at=0.0,
        )
        for key, kind in enumerate(KINDS)
    ]


def nobody(stage: str, done: int, total: int) -> None:
    """Watches."""
