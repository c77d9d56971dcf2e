"""What takes minutes: a model of 0.3 billion parameters in bounded memory, killed once; other readers of our files.

`pytest -m slow tests/quant`. The second needs WHIPPET_GPTQMODEL_PYTHON, an interpreter of an environment of its own:
python -m venv E && E/bin/pip install setuptools wheel torch==2.13.0 transformers==5.17.0 accelerate &&
E/bin/pip install --no-build-isolation gptqmodel==7.6.0
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from quant.checkpoint.formats import read_spec
from quant.decoder import Decoder
from quant.quantizer import QuantizeOptions, quantize

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
MEMORY = 3 << 30
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 14,
    "vocab_size": 65536,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def write_model(folder: Path) -> None:
    """Random weights, and a text of random words that its tokenizer knows."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) * 0.02).bfloat16()

    linears = {"self_attn.q_proj": (2048, 1024), "self_attn.k_proj": (1024, 1024), "self_attn.v_proj": (1024, 1024)}
    linears |= {"self_attn.o_proj": (1024, 2048), "mlp.gate_proj": (3072, 1024), "mlp.up_proj": (3072, 1024)}
    linears |= {"mlp.down_proj": (1024, 3072)}
    norms = {"input_layernorm": 1024, "post_attention_layernorm": 1024}
    norms |= {"self_attn.q_norm": 128, "self_attn.k_norm": 128}
    tensors = {"model.embed_tokens.weight": normal(65536, 1024), "model.norm.weight": torch.ones(1024).bfloat16()}
    for layer in range(14):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": normal(*shape) for name, shape in linears.items()}
        tensors |= {f"{prefix}{name}.weight": torch.ones(size).bfloat16() for name, size in norms.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(65536)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    words = torch.randint(0, 65536, (80_000,), generator=random).tolist()
    (folder.parent / "text.txt").write_text(" ".join(f"t{i}" for i in words))


def finished(out: Path) -> list[object]:
    """Records of the layers that an unfinished job has behind it."""
    state = out / ".partial" / "state.json"
    return json.loads(state.read_text())["layers"] if state.is_file() else []


def run(source: Path, out: Path, kill_after: int | None) -> int:
    """One run of the command, killed after so many layers; returns its peak memory, in bytes."""
    options = ["--text", str(source.parent / "text.txt"), "--held-out", "8", "--threads", "2"]
    command = [sys.executable, "-m", "quant", "quantize", str(source), str(out), *options]
    peak = 0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        watched = psutil.Process(child.pid)
        while child.poll() is None:
            time.sleep(0.2)
            try:
                peak = max(peak, watched.memory_info().rss)
            except psutil.NoSuchProcess:
                break
            if kill_after is not None and len(finished(out)) >= kill_after:
                child.send_signal(signal.SIGKILL)
                break
        child.wait()
    assert child.returncode == (0 if kill_after is None else -signal.SIGKILL)
    return peak


def test_a_third_of_a_billion_parameters_in_three_gigabytes(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    write_model(source)
    first = run(source, out, kill_after=5)
    before = finished(out)
    assert 5 <= len(before) < 14
    second = run(source, out, kill_after=None)
    report = json.loads((out / "quantization.json").read_text())
    assert report["layers"][: len(before)] == before  # their very seconds: they were not done again
    assert len(report["layers"]) == 14
    assert max(first, second) < MEMORY
    assert read_spec(out) is not None


READER = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float16, device_map="cpu").eval()
ids = torch.randint(0, model.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    save_file({"ids": ids, "logits": model(ids).logits.float()}, sys.argv[2])
"""


def test_transformers_reads_what_we_write(tmp_path):
    """Through gptqmodel, whose kernels work in float16: the tolerance is theirs."""
    python = os.environ.get("WHIPPET_GPTQMODEL_PYTHON")
    assert python, f"WHIPPET_GPTQMODEL_PYTHON is not set. {__doc__}"
    out = tmp_path / "out"
    quantize(
        ROOT / "models" / "demo", out, QuantizeOptions(group=64, own_text=True, samples=16, length=128), lambda *_: None
    )
    subprocess.run([python, "-c", READER, str(out), str(tmp_path / "theirs")], check=True, timeout=1200)
    theirs = load_file(tmp_path / "theirs")
    decoder = Decoder.open(out)
    ours = decoder.logits(decoder.hidden(theirs["ids"]))
    error = theirs["logits"] - ours
    assert float(error.square().mean().sqrt()) < 0.02
    assert float(error.abs().max()) < 0.15
    assert float((theirs["logits"].argmax(-1) == ours.argmax(-1)).float().mean()) > 0.98
