"""The oracle is what building the model for real comes to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.registry import EXECUTORS, ExecutorEntry
from engine.settings import EngineSettings
from engine.worker import doctor, hardware
from engine.worker.build import build
from quant.checkpoint.digest import of_model, of_texts

pytestmark = pytest.mark.isa

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"


def settings(folder: Path | str = DEMO, **given: Any) -> EngineSettings:
    return EngineSettings(model=str(folder), device="cpu", **given)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """The demo model with changes to its config.json."""

    def make(**changes: Any) -> Path:
        for file in DEMO.iterdir():
            if file.is_file():
                shutil.copy(file, tmp_path / file.name)
        config = json.loads((DEMO / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        return tmp_path

    return make


@pytest.mark.proof
@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_it_tells_what_building_comes_to(dtype: Any) -> None:
    report = doctor.examine(settings(dtype=dtype))
    runner = build(settings(dtype=dtype), lambda stage, done, total: None)
    try:
        info = runner.info
    finally:
        runner.close()
    assert report.problems == []
    assert report.model is not None
    assert (report.model.architecture, report.model.weight_format) == (info.architecture, info.weight_format)
    assert (report.model.max_context, report.model.pages) == (info.max_context, info.total_pages)
    assert [one.name for one in report.decoders if one.chosen] == [info.decoder]
    assert [one.name for one in report.dtypes if one.chosen] == [info.dtype]
    assert [one.name for one in report.optimizations if not one.chosen] == [one.name for one in info.unused]
    assert all(one.reason for one in info.unused)
    assert all(one.chosen or one.reason for one in report.optimizations)
    assert [one.name for one in report.formats if one.chosen] == [info.weight_format]
    assert report.device == info.device
    # norms are kept in float32, all else as computed
    assert report.model.weights_bytes <= info.weights_bytes <= report.model.weights_bytes * 1.05


@pytest.mark.product
def test_a_draft_model_takes_pages_and_guesses() -> None:
    report = doctor.examine(settings(draft_model=str(DEMO.parent / "demo-draft"), kv_bytes=4 << 20))
    runner = build(settings(draft_model=str(DEMO.parent / "demo-draft"), kv_bytes=4 << 20), lambda *_: None)
    runner.close()
    alone = doctor.examine(settings(kv_bytes=4 << 20)).model
    assert report.problems == []
    assert report.model is not None
    assert alone is not None
    assert report.model.pages == runner.info.total_pages < alone.pages
    assert [(one.name, one.reason or "") for one in report.proposers] == [
        (one.name, one.why_not) for one in runner.info.proposers
    ]


@pytest.mark.product
def test_pages_are_counted_as_they_are_kept() -> None:
    given = settings(kv_dtype="fp8", kv_bytes=4 << 20)
    plain = replace(given, kv_dtype="auto")
    infos = []
    for one in (given, plain):
        report, runner = doctor.examine(one), build(one, lambda *_: None)
        runner.close()
        assert report.model is not None
        assert report.model.pages == runner.info.total_pages
        infos.append(runner.info)
    narrow, wide = (getattr(torch, info.kv_dtype) for info in infos)
    assert narrow == torch.float8_e4m3fn
    assert infos[0].total_pages // wide.itemsize == infos[1].total_pages


@pytest.mark.proof
@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_its_digest_is_that_of_a_model_that_is_served(quantization: Any) -> None:
    given = settings(quantization=quantization)
    report = doctor.examine(given, digest=True)
    runner = build(given, lambda stage, done, total: None)
    runner.close()
    assert report.model is not None
    assert report.model.digest == of_model(runner.info.weights_digest, of_texts(DEMO))


@pytest.mark.parametrize(("flags", "chosen"), [({"avx512_bf16"}, "bfloat16"), ({"avx512f"}, "float32")])
def test_the_type_of_a_bfloat16_model_follows_the_cpu(
    flags: set[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "cpu_features", lambda: hardware.CpuFeatures(frozenset(flags)))
    dtypes = {one.name: one for one in doctor.examine(settings()).dtypes}
    assert [name for name, one in dtypes.items() if one.chosen] == [chosen]
    lacking = "no bfloat16 arithmetic" in (dtypes["bfloat16"].reason or "")
    assert lacking is (chosen == "float32")


def test_without_a_model() -> None:
    report = doctor.examine(settings(""))
    assert (report.model, report.problems) == (None, [])
    graph, portable, eager = report.decoders
    for one, name in ((graph, "graph"), (portable, "portable")):
        assert (one.name, one.chosen, one.reason) == (name, False, "needs a CUDA device")
    assert (eager.name, eager.chosen) == ("eager", True)
    assert report.torch == torch.__version__


def refuser(reason: str | None) -> ExecutorEntry:
    def make(parts: object) -> Any:
        raise AssertionError("the doctor makes no decoder")

    return ExecutorEntry("fast_steps", "fast", lambda parts: reason, make)


def test_why_a_decoder_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXECUTORS", (refuser("no graph here"), EXECUTORS[-1]))
    report = doctor.examine(settings())
    assert [(one.name, one.chosen, one.reason) for one in report.decoders][:2] == [
        ("fast", False, "no graph here"),
        ("eager", True, None),
    ]
    monkeypatch.setattr(doctor, "EXECUTORS", (refuser(None), EXECUTORS[-1]))
    report = doctor.examine(settings())
    assert [(one.name, one.chosen) for one in report.decoders] == [("fast", True), ("eager", False)]
    assert report.decoders[1].reason == "a better one can serve"
    report = doctor.examine(settings(decoder="eager"))
    assert [(one.name, one.chosen) for one in report.decoders] == [("fast", False), ("eager", True)]


def test_what_the_portable_decoder_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, portable = (
        replace(refuser(reason), decoder=name) for name, reason in (("graph", "not this one"), ("portable", None))
    )
    monkeypatch.setattr(doctor, "EXECUTORS", (graph, portable, EXECUTORS[-1]))
    monkeypatch.setattr("engine.worker.doctor.portable.why_slow_attention", lambda parts: "heads of 96")
    report = doctor.examine(settings())
    assert [one.name for one in report.decoders if one.chosen] == ["portable"]
    reasons = {one.name: one.reason for one in report.optimizations}
    lacking = "the graph decoder does not serve: not this one"
    assert reasons == {"fused_kernels": None, "graphs": None, "speculation": lacking, "two_pass_head": lacking}
    assert {one.reason for one in report.proposers} == {"no executor in use verifies drafts"}
    assert "long contexts are slow with the portable decoder: heads of 96" in report.warnings


def test_no_decoder_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXECUTORS", (refuser("no graph here"),))
    assert doctor.examine(settings()).problems == ["no decoder can serve this model here (fast: no graph here)"]


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"intermediate_size": 700}, "has shape"),
    "layers": ({"num_hidden_layers": 30, "layer_types": None, "max_window_layers": 30}, "is missing"),
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, "is not served"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "cannot be served"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_folder_that_cannot_be_served(folder: Callable[..., Path], case: str) -> None:
    changes, says = BROKEN[case]
    path = folder(**changes)
    (problem,) = doctor.examine(settings(path)).problems
    assert says in problem
    assert str(path) in problem
    assert "\n" not in problem


def test_a_truncated_file(folder: Callable[..., Path]) -> None:
    path = folder()
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (problem,) = doctor.examine(settings(path)).problems
    assert str(weights) in problem
    assert "truncated" in problem


def test_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "free_bytes", lambda device: 1_000_000)
    (problem,) = doctor.examine(settings()).problems
    assert "1000000 are free" in problem


def test_an_absent_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = doctor.examine(EngineSettings(model="", device="cuda"))
    assert report.device is None
    assert report.problems == ["device cuda: no CUDA device is usable here; use device cpu or auto"]


def test_a_driver_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("CUDA driver\ninitialization failed")

    monkeypatch.setattr(torch.cuda, "device_count", fail)
    assert doctor.examine(settings()).problems == ["CUDA driver initialization failed"]


def test_it_prints_one_object_and_its_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert doctor.main(["--model", str(DEMO), "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []
    assert doctor.main(["--model", str(tmp_path)]) == 1
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 1


def test_a_split_model_is_reported_rank_by_rank() -> None:
    """The parts of all ranks are the model, and what no rank has is named."""
    whole, split = doctor.examine(settings()), doctor.examine(settings(tensor_parallel=2))
    assert [one.rank for one in split.ranks] == [0, 1]
    assert not whole.ranks
    assert whole.model is not None
    assert split.model is not None
    assert sum(one.tokens for one in split.ranks) == 8192
    assert sum(one.weights_bytes for one in split.ranks) >= whole.model.weights_bytes
    fused = next(one for one in split.optimizations if one.name == "fused_kernels")
    assert "tensor-parallel" in str(fused.reason)
    refused = doctor.examine(settings(tensor_parallel=3))
    assert "cannot be divided among 3" in refused.problems[0]
