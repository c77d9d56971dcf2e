"""Quantized checkpoints on a GPU: the same numbers as on a CPU, kept once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.weights import dequantize
from engine.linear import DenseLinear
from engine.linear.canonical import CanonicalLinear
from engine.linear.cuda import CudaLinear
from engine.linear.products import CpuProducts, NoProducts
from engine.model.weights import Layer
from engine.settings import EngineSettings
from engine.worker.build import prepare

pytestmark = pytest.mark.gpu
STORED = Path(__file__).resolve().parents[2] / "quant" / "fixtures"
DEMO = Path(__file__).resolve().parents[3] / "models"


def layers_of(folder: Path, **given: Any) -> tuple[Layer, ...]:
    settings = EngineSettings(model=str(folder), max_sequences=1, kv_bytes=1 << 24, **given)
    return prepare(settings, lambda stage, done, total: None).parts.model.weights.layers


@pytest.mark.parametrize(
    ("folder", "quantization"),
    [(STORED / "awq-tiny", "auto"), (STORED / "bnb-int8-tiny", "auto"), (DEMO / "demo", "int8")],
    ids=["awq", "bnb", "int8"],
)
def test_a_card_has_the_numbers_of_a_cpu(folder: Path, quantization: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_products(*_: object, **__: object) -> CpuProducts:
        raise NoProducts("weights as they were read are wanted")

    monkeypatch.setattr("engine.worker.build.open_products", without_products)
    ours = layers_of(folder, device="cuda", quantization=quantization)
    theirs = layers_of(folder, device="cpu", dtype="float32", quantization=quantization)
    eight = folder.name != "awq-tiny"
    for one, other in zip(ours, theirs, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            linear, exact = getattr(one, name), getattr(other, name)
            assert isinstance(exact, CanonicalLinear)
            expected = exact.weight.dequantize(torch.float32)
            if isinstance(linear, CudaLinear):
                assert linear.matrix.data.is_cuda
                found = dequantize(linear.matrix, 0, linear.matrix.rows, torch.float32)
            elif isinstance(linear, DenseLinear):  # columns that the kernels read in bfloat16 only
                found, expected = linear.weight.float(), expected.bfloat16().float()
            else:
                assert isinstance(linear, CanonicalLinear)
                found = linear.weight.dequantize(torch.float32)
            # Four bits come as they are; a division may round the last bit otherwise, and with it a weight halfway.
            close = torch.isclose(found.cpu(), expected, rtol=1e-6 if eight else 0.0, atol=0.0)
            assert float(close.float().mean()) > (0.999 if eight else 1 - 1e-9)
            assert float((found.cpu() - expected).abs().max()) <= 1.01 / 127 * float(expected.abs().max())
            x = torch.randn(3, expected.shape[1], generator=torch.Generator().manual_seed(0))
            y = linear(x.cuda().bfloat16()).float().cpu()
            exactly = x.bfloat16().float() @ expected.T
            assert float((y - exactly).square().mean().sqrt() / exactly.square().mean().sqrt()) < 0.01
