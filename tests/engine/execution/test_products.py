"""Prompts in graphs where there is no GPU for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.errors import Unsupported
from engine.execution import products
from engine.execution.graph_prefill import executor as stage
from engine.execution.step_state import Unfit
from engine.kernels.weights import Format, Matrix
from engine.linear import DenseLinear
from engine.linear.cuda import CudaLinear
from engine.settings import EngineSettings
from engine.worker.build import Prepared, make_runner, prepare

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


def watch(name: str, done: int, total: int) -> None:
    """Nobody watches."""


def prepared(folder: Path) -> tuple[EngineSettings, Prepared]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    settings = EngineSettings(model=str(folder), device="cpu", load_format="dummy", max_sequences=2, threads=1)
    return settings, prepare(settings, watch)


def test_a_cpu_has_none(tmp_path: Path) -> None:
    _, found = prepared(tmp_path)
    with pytest.raises(Unfit, match="CUDA"):
        stage.make(found.parts)


def test_a_switch_that_no_decoder_has_is_refused(tmp_path: Path) -> None:
    runner = make_runner(*prepared(tmp_path), watch)
    with pytest.raises(Unsupported, match="warp"):
        runner.set_optimization("warp", True)


def test_linears_that_no_kernel_multiplies_by_are_named() -> None:
    class Odd:
        nbytes = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert products.why_not(Odd()) == "linears of type Odd"
    assert products.why_not(DenseLinear(torch.ones(2, 2))) is None
    matrix = Matrix(Format.INT8, 8, 64, torch.zeros(8, 64, dtype=torch.int8), row_scale=torch.ones(8))
    assert products.why_not(CudaLinear(matrix, None)) is None
