"""What loading quantized weights holds, and what stays: measured on a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quant.checkpoint.config import parse_config
from quant.checkpoint.tensors import dense_tensors, linears

pytestmark = pytest.mark.proof

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "torch_dtype": "float16",
}

MEMORY = """
import gc, sys
from pathlib import Path
from engine.worker.build import prepare
from engine.settings import EngineSettings

def field(name):
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024

import torch
torch.ones(64, 512) @ torch.ones(512, 512)
torch.ones(64, 512, dtype=torch.bfloat16) @ torch.ones(512, 512, dtype=torch.bfloat16)
Path("/proc/self/clear_refs").write_text("5")
before = field("VmRSS")
settings = EngineSettings(
    model=sys.argv[1], quantization=sys.argv[2], device="cpu", threads=1, kv_bytes=1 << 20, max_sequences=1
)
held = prepare(settings, lambda *told: None)
gc.collect()
layers = held.parts.model.weights.layers
packed = sum(one.nbytes for layer in layers for one in (layer.qkv, layer.output, layer.gate_up, layer.down))
sys.stdout.write(f"{field('VmRSS') - before} {field('VmHWM') - before} {held.parts.model.weights.nbytes} {packed}")
"""


def wide(root: Path, *, packed: bool) -> Path:
    """Four layers whose linears are 128 MiB as bfloat16; only their size matters."""
    parsed = parse_config(CONFIG, "config.json")
    held = {name: torch.ones(shape, dtype=torch.float16) for name, shape in dense_tensors(parsed).items()}
    if not packed:
        return write(root, CONFIG, held)
    section = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    for name, (inputs, outputs), _ in linears(parsed):
        if ".layers." in name:
            del held[f"{name}.weight"]
            for stem, height in (("qweight", inputs), ("qzeros", inputs // 128)):
                held[f"{name}.{stem}"] = torch.ones(height, outputs // 8, dtype=torch.int32)
            held[f"{name}.scales"] = torch.ones(inputs // 128, outputs, dtype=torch.float16)
    return write(root, {**CONFIG, "quantization_config": section}, held)


def write(folder: Path, config: dict[str, Any], held: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(held, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("form", "share"), [("auto", 0.27), ("int8", 0.51)])
def test_no_plain_copy_is_kept_and_none_is_made(form: str, share: float, tmp_path: Path) -> None:
    folder = wide(tmp_path, packed=form == "auto")
    done = subprocess.run([sys.executable, "-c", MEMORY, str(folder), form], capture_output=True, text=True, check=True)
    resident, peak, counted, packed = map(int, done.stdout.split())
    plain = 4 * (4 * 1024 * 1024 + 3 * 4096 * 1024) * 2  # bytes, as bfloat16
    assert packed / plain < share
    assert packed < counted < packed + (1 << 20)
    # Beside the weights: pages, angles, libraries mapped at their first use. While loading: one linear, its tensors of
    # the file, and what the digest reads at once. A plain copy would be 128 MiB.
    assert resident < counted + (14 << 20)
    assert peak < counted + (56 << 20)
