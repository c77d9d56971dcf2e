"""The oracle is what the executors ask for when they start, over the whole model, on a GPU that is made up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.execution import capture
from engine.execution.registry import EXECUTORS
from engine.execution.step_state import GpuKernels, Parts
from engine.kernels.build import Source, WantedKernels
from engine.kernels.gpu import GpuShape, gpu_of
from engine.kv.kv_cache import KvCache, KvShape
from engine.linear import Placement
from engine.linear.plain_copies import plain_copies
from engine.loading.formats import read_folder
from engine.model.transformer import Transformer
from engine.sampling.sampler import Sampler
from engine.settings import EngineSettings
from engine.worker.foretold import Foretelling, foretell
from engine.worker.shapes import shape_weights

MODELS = Path(__file__).resolve().parents[3] / "bench" / "models"
H100 = gpu_of((9, 0), 132, 227 << 10)
A10 = gpu_of((8, 6), 72, 99 << 10)


class Event:
    def synchronize(self) -> None: ...

    def record(self, *stream: object) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 1.0


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What starts call of a GPU does nothing; a capture does what it would capture."""

    def record(self: object, enqueue: Any, *, rehearse: bool = False) -> Any:
        enqueue()
        return SimpleNamespace(replay=lambda: None)

    tensor = torch.tensor
    monkeypatch.setattr(capture.Recorder, "record", record)
    monkeypatch.setattr(torch, "tensor", lambda *given, pin_memory=False, **how: tensor(*given, **how))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *given: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "Event", lambda **how: Event())
    monkeypatch.setattr(torch.Tensor, "cpu", lambda one: torch.zeros(one.shape, dtype=one.dtype))
    monkeypatch.setattr(torch.Tensor, "__int__", lambda one: 0)


def folder_of(tmp_path: Path, model: str, layers: int, **changes: Any) -> Path:
    """The config of a model with fewer layers."""
    config = json.loads((MODELS / model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers, **changes}))
    return tmp_path


def started(settings: EngineSettings, gpu: GpuShape, copies: bool) -> set[Source]:
    """Every source that is asked for until all executors are ready."""
    config, form = read_folder(Path(settings.model), "auto")
    nowhere = Placement(torch.bfloat16, torch.device("meta"))
    weights, wanted = shape_weights(config, form, torch.bfloat16), WantedKernels(gpu)
    sequences, context = settings.max_sequences or 256, settings.max_context or config.max_context
    linears = [one for layer in weights.layers for one in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    parts = Parts(
        model=Transformer(config, weights, torch.empty(context, 2, config.head_dim, device="meta"), nowhere),
        pool=KvCache(KvShape(config.layers, config.kv_heads, config.head_dim), 1, nowhere, heads_outside=False),
        sampler=Sampler(config.vocab_size, 1, torch.device("cpu")),
        max_sequences=sequences,
        max_context=context,
        plain=plain_copies(linears, sequences if copies else 1, 1 << 62),
        gpu=GpuKernels(wanted),
    )
    for entry in EXECUTORS:
        if entry.decoder == "graph" and entry.why_not(parts) is None:
            entry.make(parts).warmup(lambda phase, done, total: None)
    return wanted.sources


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(
    ("model", "gpu", "sequences"),
    [("qwen3-0.6b", H100, 256), ("mistral-7b-awq", H100, 256), ("qwen3-0.6b-awq", A10, 4)],
)
def test_all_that_is_asked_for_is_foretold(tmp_path: Path, model: str, gpu: GpuShape, sequences: int) -> None:
    settings = EngineSettings(
        model=str(folder_of(tmp_path, model, 4)), max_sequences=sequences, max_context=4096, kv_bytes=1 << 34
    )
    config, form = read_folder(tmp_path, "auto")
    told = foretell(settings, Foretelling(config, form, gpu))
    with_copies, without = started(settings, gpu, True), started(settings, gpu, False)
    assert told == with_copies | without
    assert len(told) > 20
