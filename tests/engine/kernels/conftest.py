"""The GPU and what runs on it. Tests marked `gpu` need both."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from engine.kernels.attention import Heads, LayerAttention
from engine.kernels.build import Kernel, KernelLibrary, open_library, parameters_of, source_text
from engine.kernels.launch import Launcher
from engine.kernels.weights import to_matrix
from engine.model.layers.few_rows import LayerWeights, StepProduct, StepWeights
from quant.checkpoint.forms import Dense, Int4Groups, Int8Rows
from scripts.sanitize import KERNELS


@pytest.fixture(scope="session")
def launcher() -> Launcher:
    return Launcher()


@pytest.fixture(scope="session")
def library(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    return open_library(torch.cuda.get_device_capability(), kernels(tmp_path_factory, "cubins"))


def kernels(factory: pytest.TempPathFactory, name: str) -> Path:
    """Where compiled kernels are kept: nowhere for longer than the tests, or where `scripts.sanitize` says."""
    kept = os.environ.get(KERNELS)
    return Path(kept) / name if kept else factory.mktemp(name)


@pytest.fixture(scope="session")
def older_library(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    """Kernels as a GPU of compute capability 8.0 gets them, translated for this one."""
    return open_library(torch.cuda.get_device_capability(), kernels(tmp_path_factory, "ptx"), "compute_80")


class RecordingKernels:
    """Gives kernels that cannot run, with the parameters of the real ones, and keeps what was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, int], int]] = []

    def kernel(self, name: str, entry: str, defines: Mapping[str, int], shared: int = 0) -> Kernel:
        self.asked.append((name, entry, dict(defines), shared))
        return Kernel(entry, parameters_of(source_text(f"{name}.cu"), entry), None)


@pytest.fixture
def recorder() -> RecordingKernels:
    return RecordingKernels()


def small_model(form: str) -> StepWeights:
    """A model of two layers whose shapes take every path of the kernels: uneven divisions, biases, a window, norms."""
    heads = Heads(6, 2, 64, True)
    hidden, inner, vocabulary = 896, 640, 1003

    def product(rows: int, columns: int, *, bias: bool = False) -> StepProduct:
        weight: Dense | Int8Rows | Int4Groups
        if form == "bf16":
            weight = Dense(torch.randn(rows, columns).bfloat16())
        elif form == "int8":
            weight = Int8Rows(torch.randint(-128, 128, (rows, columns), dtype=torch.int8), torch.rand(rows))
        else:
            groups = (rows, columns // 64)
            packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
            weight = Int4Groups(packed, torch.rand(groups).half(), torch.randint(0, 16, groups, dtype=torch.uint8), 64)
        return StepProduct(to_matrix(weight), torch.randn(rows) if bias else None)

    def layer(window: int | None) -> LayerWeights:
        pool = torch.zeros(2, 4, heads.keys, 16, heads.dim, dtype=torch.bfloat16)
        gain = torch.ones(heads.dim)
        return LayerWeights(
            input_gain=torch.ones(hidden),
            qkv=product(heads.rows, hidden, bias=True),
            attention=LayerAttention(pool[0], pool[1], gain, gain, window),
            output=product(hidden, heads.queries * heads.dim),
            mlp_gain=torch.ones(hidden),
            gate_up=product(2 * inner, hidden),
            down=product(hidden, inner),
        )

    head = to_matrix(Dense(torch.randn(vocabulary, hidden).bfloat16()))
    layers = [layer(None), layer(32)]
    return StepWeights(head.data, layers, torch.ones(hidden), head, heads, 1e-6, torch.zeros(64, 2, heads.dim))


@pytest.fixture
def model() -> Callable[[str], StepWeights]:
    return small_model
