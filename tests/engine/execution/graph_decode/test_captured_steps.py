"""What of captured steps can be told without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.execution.graph_decode import captured_steps
from engine.execution.graph_decode.captured_steps import CapturedSteps, Steps, distinct
from engine.kernels import two_pass
from engine.kernels.build import CubinCache, Kernel, KernelLibrary, parameters_of, source_text
from engine.kernels.launch import Launch, Shape
from tests.engine.kernels.conftest import small_model


def steps(longest: int, attention: Kernel, blocks: int) -> Steps:
    product = Launch(PRODUCT, Shape((132, 1, 1), 288), {}, ())
    return Steps(longest, (product, Launch(attention, Shape((blocks, 1, 1), 256), {}, ())), {})


PRODUCT, NARROW, WIDE = (Kernel(name, (), None) for name in ("product", "narrow", "wide"))


def test_of_steps_that_launch_the_same_only_the_longest_stays() -> None:
    kept = [steps(512, NARROW, 4), steps(2048, NARROW, 16), steps(9000, WIDE, 16)]
    assert distinct(kept) == tuple(kept)
    same = [steps(512, NARROW, 4), steps(2048, NARROW, 16), steps(9000, NARROW, 16)]
    assert [one.longest for one in distinct(same)] == [512, 9000]
    assert [one.longest for one in distinct(same[:1])] == [512]


class Unloaded(KernelLibrary):
    """A library whose kernels are compiled and go nowhere."""

    def _load(self, name: str, entry: str, defines: Mapping[str, int], shared: int) -> Kernel:
        self._code((name, tuple(sorted(defines.items()))))
        return Kernel(entry, parameters_of(source_text(f"{name}.cu"), entry), None)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options))
    card = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for name in ("Launcher", "Recorder"):
        monkeypatch.setattr(captured_steps, name, lambda *given: None)


@pytest.mark.usefixtures("no_gpu")
def test_every_kernel_of_every_bucket_is_compiled_ahead_and_once(tmp_path: Path) -> None:
    compiled: list[tuple[Any, ...]] = []

    def compile_source(source: str, name: str, defines: Mapping[str, int], arch: str) -> bytes:
        compiled.append((name, *sorted(defines.items())))
        assert threading.current_thread().name.startswith("compile")  # none later, where it would be alone
        return b"code"

    library = Unloaded("sm_90a", CubinCache(tmp_path, "compiler", compile_source))
    weights = small_model("int4")
    weights = replace(weights, coarse=two_pass.coarse_copy(weights.head, 8))
    steps = CapturedSteps(library, weights, 4096, 8)
    steps.build((1,))
    steps.build((1, 2, 4, 8))
    assert len(compiled) == len(set(compiled)) > 20
    assert {one[0] for one in compiled} >= {"two_pass_head.cu", "head.cu", "sampling.cu", "attention.cu", "advance.cu"}
    # Where all blocks run at once pages of a long context lie in shared memory; else nothing changes at 2,048 tokens.
    few, many = steps._buckets[4], steps._buckets[8]
    assert [one.longest for one in few.two_pass] == [512, 1024, 2048, 4096]
    assert [one.longest for one in many.two_pass] == [512, 1024, 4096]
