"""The kernels' logits beside those of transformers in bfloat16, both against float32, token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.kernels.build import open_library
from engine.kernels.launch import Launcher
from engine.model.layers.few_rows import ChainPlan, allocate, prepare_start, prepare_step
from engine.model.layers.few_rows_weights import step_weights
from engine.settings import EngineSettings
from engine.worker.build import prepare
from quant.checkpoint.config import parse_config
from quant.checkpoint.tensors import dense_tensors

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[4]
RANDOM = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "dtype": "bfloat16",
}
SAMPLES = 2000  # of the bootstrap


def random_model(folder: Path) -> Path:
    """Key norms as large as a published model has them, and logits as decided as a trained one's."""
    (folder / "config.json").write_text(json.dumps(RANDOM))
    generator = torch.Generator().manual_seed(7)
    held = {}
    for name, shape in dense_tensors(parse_config(dict(RANDOM), "config.json")).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("k_norm.weight"):
            values = 1 + values.abs()
            values[torch.randperm(shape[0], generator=generator)[:4]] = torch.tensor([96.0, 60.0, 40.0, 20.0])
        elif name.endswith("norm.weight"):
            values = 1 + 0.3 * values
        else:
            values *= 1.0 / shape[-1] ** 0.5
        held[name] = values.bfloat16()
    save_file(held, folder / "model.safetensors")
    return folder


def ours(folder: Path, tokens: Items[int]) -> torch.Tensor:
    """Logits [tokens, vocab] as the captured step has them."""
    settings = EngineSettings(model=str(folder), device="cuda", dtype="bfloat16", max_sequences=1, kv_bytes=64 << 20)
    parts = prepare(settings, lambda stage, done, total: None).parts
    with torch.inference_mode():
        weights = step_weights(parts)
        pages = -(-parts.max_context // 16)
        buffers = allocate(weights, 1, pages, 64, logits=True)
        library, launcher = open_library(torch.cuda.get_device_capability()), Launcher()
        plan = ChainPlan(torch.cuda.get_device_properties(0).multi_processor_count, longest=parts.max_context)
        chain = [prepare_start(library, weights, buffers), *prepare_step(library, weights, buffers, plan)]
        buffers.places.pages[0].copy_(torch.randperm(parts.pool.pages)[:pages])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launcher.enqueue(chain)
        found = []
        for position, token in enumerate(tokens):
            buffers.progress.token.fill_(token)
            buffers.places.position.fill_(position)
            graph.replay()
            assert buffers.choice.logits is not None
            found.append(buffers.choice.logits[0].clone())
        return torch.stack(found)


def theirs(folder: Path, tokens: Items[int], dtype: torch.dtype) -> torch.Tensor:
    """As transformers has them."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to("cuda").eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens], device="cuda")).logits[0].float()


def interval(values: torch.Tensor) -> tuple[float, float, float]:
    """Mean, and its 95 % interval by bootstrap."""
    generator = torch.Generator(device=values.device).manual_seed(1)
    picks = torch.randint(len(values), (SAMPLES, len(values)), generator=generator, device=values.device)
    means = values[picks].mean(-1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=means.dtype, device=means.device)).tolist()
    return float(values.mean()), low, high


@pytest.mark.parametrize("which", ["demo", "random"])
def test_no_worse_than_transformers_in_bfloat16(which: str, tmp_path: Path, record_property: Any) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    if which == "demo":
        folder = ROOT / "models" / "demo"
        from tokenizers import Tokenizer

        text = (ROOT / "docs" / "architecture.md").read_text() + (ROOT / "README.md").read_text()
        tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:2000]
    else:
        folder = random_model(tmp_path)
        tokens = torch.randint(0, 4096, (2000,), generator=torch.Generator().manual_seed(9)).tolist()
    exact = theirs(folder, tokens, torch.float32).double().log_softmax(-1)
    labels = torch.tensor(tokens[1:], device="cuda").unsqueeze(1)
    divergence, loss = {}, {}
    for name, logits in (("ours", ours(folder, tokens)), ("theirs", theirs(folder, tokens, torch.bfloat16))):
        found = logits.double().log_softmax(-1)
        divergence[name] = (exact.exp() * (exact - found)).sum(-1)
        loss[name] = (found - exact)[:-1].gather(1, labels).squeeze(1).abs()
    for what, values in (("divergence", divergence), ("loss", loss)):
        mean, low, high = interval(values["ours"] - values["theirs"])
        told = f"{which} {what}: {values['ours'].mean():.3e} against {values['theirs'].mean():.3e}"
        record_property(what, f"{told}, difference {mean:.2e} ({low:.2e} … {high:.2e})")
        assert high <= 0, f"{told}, difference {mean:.2e} ({low:.2e} … {high:.2e})"
