"""The oracle is what executors are chosen by at a start, and what their kernels ask a GPU for."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from engine.execution.registry import EXECUTORS
from engine.kernels.gpu import gpu_of
from engine.loading.formats import FolderFormat
from engine.settings import EngineSettings
from engine.worker.forecast import forecast
from engine.worker.required_kernels import KernelQuery, required_kernels
from quant.checkpoint.config import parse_config
from quant.checkpoint.spec import AwqSpec

MODELS = Path(__file__).resolve().parents[3] / "bench" / "models"
H100 = gpu_of((9, 0), 132, 227 << 10)
PLAIN = FolderFormat(None)
FEW = EngineSettings(model="", max_sequences=16, max_context=1024)


def query(form: FolderFormat = PLAIN, dtype: torch.dtype = torch.bfloat16, **changes: object) -> KernelQuery:
    raw = json.loads((MODELS / "qwen3-0.6b" / "config.json").read_text())
    return KernelQuery(parse_config({**raw, **changes}, "config.json"), form, H100, dtype=dtype)


def test_a_model_that_all_kernels_read() -> None:
    what = query()
    found = forecast(FEW, what)
    assert (found.choice.decoder, found.choice.objections, found.choice.missing) == ("graph", (), ())
    assert [name for name, _ in found.choice.executors] == [
        *(entry.name for entry in EXECUTORS if entry.decoder == "graph"),
        "eager",
    ]
    assert found.kernels == required_kernels(FEW, what)


def test_columns_that_four_bits_do_not_have() -> None:
    found = forecast(FEW, query(FolderFormat(AwqSpec("gemm", 64)), hidden_size=576))
    assert found.choice.decoder == "graph"
    assert found.has_plain_layers
    assert not forecast(FEW, query(FolderFormat(AwqSpec("gemm", 64)))).has_plain_layers


def test_reasons_name_the_shape() -> None:
    found = forecast(FEW, query(FolderFormat(AwqSpec("gemm", 16)), hidden_size=528)).choice
    assert found.decoder == "eager"
    assert [one.reason for one in found.objections] == [
        "packed weights: groups of 16, the kernels know (32, 64, 128) and whole rows"
    ]
    found = forecast(FEW, query(dtype=torch.float16)).choice
    assert [one.reason for one in found.objections] == ["the model is float16, the kernels compute in bfloat16"]
    found = forecast(FEW, query(head_dim=96)).choice
    assert (found.decoder, [one.decoder for one in found.missing]) == ("graph", ["batched"])
