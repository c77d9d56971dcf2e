"""The sources compile for the oldest and the fastest architecture, without a card, as the wrappers ask for them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels import sampling
from engine.kernels.build import compile_with_nvrtc, source_text
from engine.kernels.step import ChainPlan, StepWeights, allocate, prepare_start, prepare_step

ARCHITECTURES = ["sm_80", "sm_90a"]


def compile_with_nvcc(source: str, name: str, defines: Mapping[str, int], arch: str, folder: Path) -> bytes:
    target, out = folder / name, folder / f"{name}.cubin"
    target.write_text(source)
    command = ["nvcc", "-std=c++17", "-cubin", f"-arch={arch}", *(f"-D{key}={value}" for key, value in defines.items())]
    done = subprocess.run([*command, "-o", str(out), str(target)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out.read_bytes()


@pytest.fixture
def compiler(tmp_path: Path) -> Callable[[str, str, Mapping[str, int], str], bytes]:
    """NVRTC from its wheel, which the test requirements hold; where there is none, the toolkit's compiler."""
    if find_spec("cuda") is not None and find_spec("cuda.core") is not None:
        return compile_with_nvrtc
    if shutil.which("nvcc"):
        return lambda source, name, defines, arch: compile_with_nvcc(source, name, defines, arch, tmp_path)
    pytest.fail("neither NVRTC (pip install cuda-core nvidia-cuda-nvrtc) nor nvcc is here to check the kernels with")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("form", "batch"), [("bf16", 1), ("int8", 8), ("int4", 3)])
def test_a_step_compiles(
    recorder: Any,
    model: Callable[[str], StepWeights],
    compiler: Callable[[str, str, Mapping[str, int], str], bytes],
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    batch: int,
    arch: str,
) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options))
    weights = model(form)
    buffers = allocate(weights, batch, 4, 8)
    prepare_step(recorder, weights, buffers, ChainPlan(132))
    prepare_step(
        recorder, weights, buffers, ChainPlan(132), sampling.allocate(batch, weights.head.rows, torch.device("cpu"))
    )
    prepare_start(recorder, weights, buffers)
    asked = {(name, tuple(sorted(defines.items()))) for name, _, defines, _ in recorder.asked}
    assert {name for name, _ in asked} == {
        "linear",
        "linear_residual",
        "gate_up",
        "attention",
        "head",
        "sampling",
        "advance",
    }
    for name, defines in sorted(asked):
        code = compiler(source_text(f"{name}.cu"), f"{name}.cu", dict(defines), arch)
        assert code.startswith(b"\x7fELF")
