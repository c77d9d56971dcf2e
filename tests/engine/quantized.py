"""Small quantized checkpoints, packed value by value from the formats' descriptions, and their logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.api import GREEDY, GenerationRequest, Stopping
from engine.execution.eager import Eager
from engine.model.weights import Layer
from engine.scheduling.sequence import Sequence
from engine.settings import EngineSettings
from engine.worker.build import prepare
from quant.checkpoint.config import parse_config
from quant.checkpoint.tensors import dense_tensors, linears
from tests.engine.stepped import holding, known, put

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "float16",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-biases": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "mistral-window": {"architectures": ["MistralForCausalLM"], "sliding_window": 9},
    "qwen2-tied": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 9, "sliding_window_pattern": 2},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "granite": {"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
}
SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # where a word has its eight outputs
Tensors = dict[str, torch.Tensor]


def settings(folder: Path, **given: Any) -> EngineSettings:
    chosen: dict[str, Any] = {"device": "cpu", "max_sequences": 2, "threads": 1, "kv_bytes": 1 << 20, **given}
    return EngineSettings(model=str(folder), **chosen)


def nothing(stage: str, done: int, total: int) -> None:
    """No progress is looked at."""


def sequence_of(ids: list[int]) -> Sequence:
    request = GenerationRequest(
        request_id="", token_ids=tuple(ids), sampling=GREEDY, stopping=Stopping(max_tokens=1), arrived_at=0.0
    )
    return holding(request, range(-(-len(ids) // 16)))


def logits_of(folder: Path, ids: list[int], *, at_once: bool = False, **given: Any) -> torch.Tensor:
    """[tokens, vocab]: each token in a step of its own, or the last alone of a prompt at once."""
    parts = prepare(settings(folder, **given), nothing).parts
    executor, sequence = Eager(parts), sequence_of(ids)
    put(parts.sequences, sequence)
    steps = [(0, len(ids))] if at_once else [(at, 1) for at in range(len(ids))]
    with torch.inference_mode():
        found = [executor.logits([known(sequence, start, count)]) for start, count in steps]
    return torch.cat([one for one in found if one is not None])


def layers_of(folder: Path, **given: Any) -> tuple[Layer, ...]:
    return prepare(settings(folder, **given), nothing).parts.model.weights.layers


def gemm_words(values: torch.Tensor) -> torch.Tensor:
    """[rows, 8 · words] of 0…15 → int32 [rows, words]."""
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for output, shift in enumerate(SHIFTS):
        words |= values[:, output::8].long() << shift
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def awq(prefix: str, outputs: int, inputs: int, group: int, seed: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """A layer's tensors in AutoAWQ's GEMM layout, and its plain weight."""
    q = torch.randint(0, 16, (inputs, outputs), generator=seed)
    zero = torch.randint(4, 12, (inputs // group, outputs), generator=seed)
    scale = ((torch.rand(inputs // group, outputs, generator=seed) + 0.5) * 0.3 / inputs**0.5).half()
    plain = (q - zero.repeat_interleave(group, 0)).float() * scale.float().repeat_interleave(group, 0)
    held = {
        f"{prefix}.qweight": gemm_words(q),
        f"{prefix}.qzeros": gemm_words(zero),
        f"{prefix}.scales": scale,
    }
    return held, plain.T.contiguous()


def write(folder: Path, config: dict[str, Any], held: Tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(held, folder / "model.safetensors")
    return folder


def make(root: Path, family: str = "qwen3", group: int = 32, skip: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """The folders `awq` and `plain` of one random model; the config of the first."""
    config = {**BASE, **FAMILIES[family], **more}
    parsed = parse_config(config, "config.json")
    seed = torch.Generator().manual_seed(len(family))
    plain = {}
    for name, shape in dense_tensors(parsed).items():
        noise = torch.randn(shape, generator=seed)
        plain[name] = noise / shape[1] ** 0.5 * 1.5 if len(shape) == 2 else noise.abs() + 0.5
        plain[name] = plain[name].half()
    held = dict(plain)
    for name, (inputs, outputs), _ in linears(parsed):
        if ".layers." not in name or any(part in name for part in skip):
            continue
        packed, weight = awq(name, outputs, inputs, group, seed)
        held |= packed
        del held[f"{name}.weight"]
        plain[f"{name}.weight"] = weight
    section = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    quantized = {**config, "quantization_config": {**section, "modules_to_not_convert": list(skip) or None}}
    write(root / "plain", config, plain)
    write(root / "awq", quantized, held)
    return quantized


def ids_of(count: int, vocabulary: int = 96) -> list[int]:
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(3)).tolist()
