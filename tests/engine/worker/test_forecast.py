"""The oracle is what executors are chosen by at a start, and what their kernels ask a GPU for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.execution.registry import EXECUTORS
from engine.kernels.build import BuildError, WantedKernels
from engine.kernels.gpu import SHARED, gpu_of
from engine.kernels.targets import OF_WARPGROUPS
from engine.loading.formats import FolderFormat
from engine.settings import EngineSettings
from engine.worker.forecast import forecast
from engine.worker.required_kernels import KernelQuery, required_kernels
from quant.checkpoint.config import parse_config
from quant.checkpoint.spec import AwqSpec

MODELS = Path(__file__).resolve().parents[3] / "bench" / "models"
H100 = gpu_of((9, 0), 132, 227 << 10)
PLAIN = FolderFormat(None)
FEW = EngineSettings(model="", dtype="bfloat16", max_sequences=16, max_context=1024)


def query(form: FolderFormat = PLAIN, **changes: object) -> KernelQuery:
    raw = json.loads((MODELS / "qwen3-0.6b" / "config.json").read_text())
    return KernelQuery(parse_config({**raw, **changes}, "config.json"), form, H100)


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
    assert found.decoder == "portable"
    assert [one.reason for one in found.objections] == [
        "packed weights: groups of 16, the kernels know (32, 64, 128) and whole rows"
    ]
    found = forecast(replace(FEW, dtype="float16"), query()).choice
    assert [one.reason for one in found.objections] == ["the model is float16, the kernels compute in bfloat16"]
    found = forecast(FEW, query(head_dim=96)).choice
    assert (found.decoder, [one.decoder for one in found.missing]) == ("graph", ["batched"])


@pytest.mark.parametrize("form", [PLAIN, FolderFormat(AwqSpec("gemm", 128)), FolderFormat(None, int8=True)], ids=str)
@pytest.mark.parametrize("capability", SHARED)
def test_blocks_fit_every_gpu_from_8_0_to_12_0(capability: tuple[int, int], form: FolderFormat) -> None:
    """Long contexts and large matrices ask for most shared memory."""
    gpu = gpu_of(capability, 72, SHARED[capability])
    raw = json.loads((MODELS / "mistral-7b" / "config.json").read_text())
    for changes in ({}, {"head_dim": 256, "num_attention_heads": 12, "num_key_value_heads": 4}):
        config = parse_config({**raw, **changes}, "config.json")
        found = forecast(replace(FEW, max_context=8192), KernelQuery(config, form, gpu))
        assert (found.choice.decoder, found.choice.objections, found.choice.missing) == ("graph", (), ())
        offered = {name for name, _ in found.kernels}
        assert bool(offered.intersection(OF_WARPGROUPS)) == gpu.warpgroups


def test_a_block_that_asks_for_too_much_is_refused_by_name() -> None:
    gpu = gpu_of((8, 9), 58, SHARED[8, 9])
    with pytest.raises(BuildError, match="kernel head needs 102400 bytes of shared memory, a block may have 101376"):
        WantedKernels(gpu).kernel("head", "head", {}, 100 << 10)
    with pytest.raises(BuildError, match="kernel gemm: products of warpgroups need"):
        WantedKernels(gpu).kernel("gemm_wide", "gemm", {})
