"""The engine on a GPU against itself on a CPU: every family's small model, float32, and the two half precisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.api import GenerationRequest
from engine.settings import EngineSettings
from engine.worker.build import build
from quant.checkpoint.config import parse_config
from quant.checkpoint.tensors import dense_tensors

pytestmark = pytest.mark.gpu

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "dtype": "float32",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 21},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 64,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def runner_on(device: Any, folder: Path, dtype: Any = "float32") -> Any:
    settings = EngineSettings(model=str(folder), device=device, dtype=dtype, max_sequences=8)
    return build(settings, lambda stage, done, total: None)


def save(folder: Path, family: str) -> None:
    config = {**BASE, **FAMILIES[family]}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(2)
    shapes = dense_tensors(parse_config(config, "config.json"))
    held = {
        name: torch.randn(shape, generator=generator) * (1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 0.3)
        + (1.0 if name.endswith("norm.weight") else 0.0)
        for name, shape in shapes.items()
    }
    save_file(held, folder / "model.safetensors")


def asked(request_of: Any) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(3)
    sizes = (1, 5, 16, 40, 63, 100)
    texts = [torch.randint(0, 320, (size,), generator=generator).tolist() for size in sizes]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.7, "top_p": 0.9, "seed": 2},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3},
        {"temperature": 1.2, "top_k": 20, "min_p": 0.05, "seed": 3},
        {"logprobs": 3},
    ]
    return [request_of(text, 48, **kind) for text, kind in zip(texts, kinds, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_both_devices_generate_the_same(family: str, tmp_path: Path, request_of: Any, drive: Any) -> None:
    save(tmp_path, family)
    torch.backends.cuda.matmul.allow_tf32 = False
    here, there = (
        drive(runner_on(device, tmp_path), asked(request_of), budget=13, pages=24) for device in ("cpu", "cuda")
    )
    assert here.preemptions == there.preemptions > 0
    assert [one.token_ids for one in there.answers] == [one.token_ids for one in here.answers]
    for one, two in zip(here.answers[-1].logprobs, there.answers[-1].logprobs, strict=True):
        assert one.logprob == pytest.approx(two.logprob, abs=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near(dtype: str, tmp_path: Path, request_of: Any, drive: Any) -> None:
    save(tmp_path, "qwen3")
    exact = drive(runner_on("cpu", tmp_path), [request_of(list(range(60)), 1, logprobs=320)]).answers[0]
    found = drive(runner_on("cuda", tmp_path, dtype), [request_of(list(range(60)), 1, logprobs=320)]).answers[0]
    truth, ours = dict(exact.logprobs[0].top), dict(found.logprobs[0].top)
    error = max(abs(truth[token] - ours[token]) for token in truth)
    assert error < (0.4 if dtype == "bfloat16" else 0.05)
