"""Writes a model's weights, tokenizer and shape, and its vectors of the reference texts, by sentence-transformers. Runs
in a process of `export`, since this alone needs torch."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

REFERENCE = (
    "How do I reset my password?",
    "What is the capital of France?",
    "Translate this sentence from English to German.",
    "is it safe to take 500 mg of ibuprofen with coffee",
    "Write a short poem about the sea, with four stanzas and no rhymes.",
    "Why doesn't my printer connect to the wireless network any more?",
    "2+2",
    "Explain the difference between a process and a thread.",
    "Flights from Rome to Paris on 12 May under 200 euros",
    "Who wrote Hamlet, and when?",
    "My order 48213 has not arrived yet; where is it?",
    "Ich verstehe die Frage nicht.",
    "What are the advantages of remote work for a small company in a rural area, and how would you measure them?",
    "turn off notifications",
    "Give me three ideas for dinner with lentils, rice and whatever else is usually in a kitchen.",
    "The quick brown fox jumps over the lazy dog. " * 5,
    "Summarise: the council met on Tuesday, agreed on nothing, and will meet again next week to agree on the rest.",
    "¿Dónde está la biblioteca?",
    "def add(a, b): return a + b  # what does this do?",
    "SELECT name FROM users WHERE age > 30",
    "Is a tomato a fruit or a vegetable? Answer in one word.",
    "hello",
    "What happened in 1969?",
    "Recommend a quiet neighbourhood in Lisbon for a family with two children.",
)


def main(folder: str, out: str) -> None:
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    model: Any = importlib.import_module("sentence_transformers").SentenceTransformer(folder, device="cpu")
    modules = [type(module).__name__ for module in model]
    encoder = model[0].auto_model
    tensors = {name: value.float().numpy() for name, value in encoder.state_dict().items()}
    vectors = np.asarray(model.encode(list(REFERENCE), batch_size=1, normalize_embeddings=True), np.float32)
    target = Path(out)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, target / "weights.safetensors")
    save_file({"vectors": vectors}, target / "reference.safetensors")
    model.tokenizer.backend_tokenizer.save(str(target / "tokenizer.json"))
    shape = {
        "architecture": type(encoder).__name__,
        "modules": modules,
        "pooling": model[1].get_config_dict() if len(modules) > 1 else {},
        "config": encoder.config.to_dict(),
    }
    (target / "shape.json").write_text(json.dumps(shape, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:3])
