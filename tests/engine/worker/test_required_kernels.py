"""The oracle is what the executors ask for when they start, over the whole model, on a GPU that is made up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.execution.registry import EXECUTORS
from engine.execution.step_state import Parts
from engine.kernels import build, capture
from engine.kernels.build import BuildError, CubinCache, GpuKernels, KernelLibrary, Source, WantedKernels
from engine.kernels.gpu import GpuShape, gpu_of
from engine.kv.kv_cache import KvCache, stored_as
from engine.linear import Placement
from engine.linear.plain_copies import plain_copies
from engine.loading.formats import read_folder
from engine.loading.load import Loading, load
from engine.model.rope import RopeTables
from engine.model.transformer import Transformer, kv_shape
from engine.sampling.sampler import Sampler
from engine.settings import CUDA_SEQUENCES, EngineSettings, KvDtype
from engine.worker import prebuild
from engine.worker.required_kernels import KernelQuery, required_kernels, required_kernels_any_context
from engine.worker.shapes import fewer_layers, shape_weights

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

    def record(self: object, enqueue: Any, rehearse: Any = None) -> Any:
        enqueue()
        return SimpleNamespace(replay=lambda: None)

    tensor = torch.tensor
    monkeypatch.setattr(capture.Graphs, "record", record)
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


def started(settings: EngineSettings, gpu: GpuShape, copies: bool, decoder: str = "graph") -> set[Source]:
    """Every source that is asked for until all executors of the decoder are ready."""
    config, form = read_folder(Path(settings.model), "auto")
    nowhere = Placement(torch.bfloat16, torch.device("meta"))
    weights, wanted = shape_weights(config, form, torch.bfloat16), WantedKernels(gpu)
    sequences, context = settings.max_sequences or CUDA_SEQUENCES, settings.max_context or config.max_context
    linears = [one for layer in weights.layers for one in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    parts = Parts(
        model=Transformer(
            config, weights, RopeTables(torch.empty(context, 2, config.head_dim, device="meta")), nowhere
        ),
        pool=KvCache(
            kv_shape(config),
            1,
            nowhere,
            heads_outside=False,
            stored=stored_as(settings.kv_dtype, nowhere.dtype),
        ),
        sampler=Sampler(config.vocab_size, 1, torch.device("cpu")),
        max_sequences=sequences,
        max_context=context,
        plain=plain_copies(linears, sequences if copies else 1, 1 << 62),
        gpu=GpuKernels(wanted),
    )
    for entry in EXECUTORS:
        if entry.decoder == decoder and entry.why_not(parts) is None:
            entry.make(parts).warmup(lambda phase, done, total: None)
    return wanted.sources


@pytest.mark.proof
@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(
    ("model", "gpu", "sequences", "kept"),
    [
        ("qwen3-0.6b", H100, 256, "auto"),
        ("qwen3-0.6b", H100, 256, "fp8"),
        ("mistral-7b-awq", H100, 256, "auto"),
        ("qwen3-0.6b-awq", A10, 4, "auto"),
    ],
)
def test_all_that_is_asked_for_is_foretold(
    tmp_path: Path, model: str, gpu: GpuShape, sequences: int, kept: KvDtype
) -> None:
    settings = EngineSettings(
        model=str(folder_of(tmp_path, model, 3)),
        max_sequences=sequences,
        max_context=4096,
        kv_bytes=1 << 34,
        kv_dtype=kept,
    )
    config, form = read_folder(tmp_path, "auto")
    told = required_kernels(settings, KernelQuery(config, form, gpu))
    with_copies, without = started(settings, gpu, True), started(settings, gpu, False)
    assert told == with_copies | without
    assert len(told) > 20


@pytest.mark.product
@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(
    ("model", "gpu", "sequences", "kept"),
    [
        ("gemma3-1b", H100, 8, "auto"),
        pytest.param("gemma3-1b", A10, 256, "fp8", marks=pytest.mark.proof),
        pytest.param("smollm2-135m-awq", A10, 8, "fp8", marks=pytest.mark.proof),
        pytest.param("mistral-7b-awq", H100, 256, "auto", marks=pytest.mark.proof),
    ],
)
def test_all_that_the_portable_decoder_asks_for_is_foretold(
    tmp_path: Path, model: str, gpu: GpuShape, sequences: int, kept: KvDtype
) -> None:
    folder = folder_of(tmp_path, model, 2)
    settings = EngineSettings(
        model=str(folder),
        decoder="portable",
        max_sequences=sequences,
        max_context=4096,
        kv_bytes=1 << 34,
        kv_dtype=kept,
    )
    query = KernelQuery(*read_folder(folder, "auto"), gpu)
    told = required_kernels(settings, query)
    assert told == started(settings, gpu, True, "portable") | started(settings, gpu, False, "portable")
    assert {name for name, _ in told} >= {"batch_attention", "batch_sampling", "portable", "rows"}
    if model == "gemma3-1b":  # which the fused kernels do not take
        assert required_kernels(replace(settings, decoder="auto"), query) == told


def test_float16_asks_for_no_fused_kernel(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "qwen3-0.6b", 1, dtype="float16")
    settings = EngineSettings(model=str(folder), max_sequences=2, max_context=256)
    told = required_kernels(settings, KernelQuery(*read_folder(folder, "auto"), H100))
    assert {name for name, _ in told} == {"batch_attention", "batch_sampling", "portable", "rows"}
    assert all(dict(defines).get("OP_F16", 1) for name, defines in told if name == "portable")


@pytest.mark.proof
@pytest.mark.parametrize(("model", "gpu"), [("mistral-7b-awq", H100), ("qwen3-0.6b", A10)])
def test_what_is_built_ahead_serves_any_context_and_any_number_of_sequences(
    tmp_path: Path, model: str, gpu: GpuShape
) -> None:
    folder = folder_of(tmp_path, model, 2)
    config, form = read_folder(folder, "auto")

    def told(context: int | None, sequences: int | None, free: int) -> set[Source]:
        settings = EngineSettings(model=str(folder), max_context=context, max_sequences=sequences)
        return required_kernels(settings, KernelQuery(config, form, gpu, free))

    every = required_kernels_any_context(EngineSettings(model=str(folder)), KernelQuery(config, form, gpu))
    for context in (16, 40, 256, 1024, 2049, None):
        for sequences in (1, 8, 512):
            assert told(context, sequences, 80 << 30) <= every
    assert required_kernels(EngineSettings(model=str(folder), decoder="eager"), KernelQuery(config, form, gpu)) == set()


def compile_nothing(source: str, name: str, defines: Mapping[str, int], arch: str) -> bytes:
    return f"{name} {sorted(defines.items())} {arch}".encode()


@pytest.mark.proof
def test_a_folder_built_ahead_answers_all_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    model = folder_of(tmp_path / "model", "qwen3-0.6b", 3)
    monkeypatch.setattr(build, "compile_with_nvrtc", compile_nothing)
    monkeypatch.setattr(prebuild, "build_ahead", lambda folder: ())
    assert prebuild.main([f"--into={tmp_path / 'ahead'}", f"--model={model}", "--arch=sm_80,sm_90"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" for ")[1].split(",")[0] for line in said] == [
        "sm_80 with 108 multiprocessors",
        "sm_80 with 56 multiprocessors",
        "sm_90 with 132 multiprocessors",
        "sm_90 with 114 multiprocessors",
        "sm_90 with 78 multiprocessors",
    ]

    def refuse(source: str, name: str, defines: Mapping[str, int], arch: str) -> bytes:
        raise AssertionError(f"{name} is not there")

    cache = CubinCache(tmp_path / "here", build.compiler_version(), refuse, (tmp_path / "ahead",))
    library = KernelLibrary("sm_90a", cache, H100)
    config, form = read_folder(model, "auto")
    for name, defines in required_kernels(EngineSettings(model=str(model)), KernelQuery(config, form, H100)):
        assert library.code((name, defines)) == compile_nothing("", f"{name}.cu", dict(defines), "sm_90a")
    assert not (tmp_path / "here").exists()


@pytest.mark.product
def test_one_that_does_not_compile_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(source: str, name: str, defines: Mapping[str, int], arch: str) -> bytes:
        if name == "head.cu":
            raise BuildError(f"{name} for {arch}: error")
        return b"code"

    monkeypatch.setattr(build, "compile_with_nvrtc", fail)
    monkeypatch.setattr(prebuild, "build_ahead", lambda folder: ())
    model = folder_of(tmp_path, "qwen3-0.6b", 1)
    assert prebuild.main([f"--into={tmp_path / 'ahead'}", f"--model={model}", "--arch=sm_89"]) == 1
    assert capsys.readouterr().err == "whippet: head.cu for sm_89: error\n"
    assert prebuild.main([f"--into={tmp_path / 'ahead'}", f"--model={model}", "--arch=sm_70"]) == 1
    assert "architecture 'sm_70': one of sm_80" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["qwen3-0.6b", "mistral-7b-awq"])
def test_shapes_are_those_that_loading_comes_to(tmp_path: Path, model: str) -> None:
    folder = folder_of(tmp_path, model, 2)
    config, form = read_folder(folder, "auto")
    what = Loading(config, form, Placement(torch.bfloat16, torch.device("meta")))
    loaded = load(EngineSettings(model=str(folder), load_format="dummy"), folder, what, lambda *told: None).weights
    assert shape_weights(config, form, torch.bfloat16).nbytes == loaded.nbytes


def test_every_kind_of_layer_follows_every_kind_that_it_follows(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "qwen3-0.6b", 9)
    config, form = read_folder(folder, "auto")
    windows = (None, None, 64, 64, 64, None, None, 64, None)
    config = replace(config, windows=windows)
    fewer, weights = fewer_layers(config, shape_weights(config, form, torch.bfloat16))
    assert set(pairwise(fewer.windows)) == set(pairwise(windows))
    assert fewer.windows[-1] == windows[-1]
    assert fewer.layers == len(weights.layers) < len(windows)
    config = replace(config, windows=(None,) * 28)
    alike, _ = fewer_layers(config, shape_weights(config, form, torch.bfloat16))
    assert alike.layers == 2
