"""Plans for GPUs that are not here, from a folder that has no more than a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import Unsupported
from engine.kernels.gpu import SERVERS, SHARED
from engine.settings import EngineSettings
from engine.worker import doctor
from engine.worker.doctor import DoctorReport, examine_gpu
from engine.worker.gpu_plan import CONTEXT_BYTES, GpuPlan
from engine.worker.known_gpus import KNOWN, known_gpu

MODELS = Path(__file__).resolve().parents[3] / "bench" / "models"


def planned(model: str, gpu: str, **given: Any) -> DoctorReport:
    return examine_gpu(EngineSettings(model=str(MODELS / model), **given), gpu)


def plan_of(model: str, gpu: str, **given: Any) -> GpuPlan:
    report = planned(model, gpu, **given)
    assert report.problems == []
    assert report.plan is not None
    return report.plan


@pytest.mark.parametrize("gpu", ["rtx-3060", "rtx-4090", "rtx-5090", "a100-40", "h100", "b200"])
def test_a_model_that_all_of_them_serve_fused(gpu: str) -> None:
    report = planned("mistral-7b-awq", gpu)
    plan, model, known = report.plan, report.model, KNOWN[gpu]
    assert report.problems == []
    assert plan is not None
    assert model is not None
    assert (plan.path, plan.unpacked, plan.architecture) == ("fused", False, known.architecture)
    held = model.weights_bytes + plan.copies_bytes + model.kv_bytes
    assert 0.5 * known.memory_bytes < held < known.memory_bytes - CONTEXT_BYTES
    assert plan.tokens == model.pages * 16
    assert plan.sequences * 256 <= plan.tokens
    assert plan.tokens_per_second is not None
    assert plan.tokens_per_second * plan.step_bytes < known.bandwidth * 1e9
    assert bool(plan.kernels.not_offered) == (known.capability != (9, 0))
    assert not set(plan.kernels.not_offered).intersection(plan.kernels.sources)
    assert [one.name for one in report.decoders if one.chosen] == ["graph"]


def test_the_speed_follows_bytes_and_bandwidth() -> None:
    speeds = [plan_of("mistral-7b", gpu).tokens_per_second or 0 for gpu in ("l4", "rtx-4090", "h200")]
    assert speeds == sorted(speeds)
    assert (plan_of("mistral-7b-awq", "l4").tokens_per_second or 0) > 3 * speeds[0]


def test_pages_of_eight_bits_are_twice_as_many() -> None:
    wide, narrow = (plan_of("mistral-7b", "l4", kv_dtype=kept) for kept in ("auto", "fp8"))
    assert narrow.tokens // wide.tokens == 2


def test_copies_of_weights_that_no_kernel_reads_take_memory() -> None:
    """In float16 no kernel reads packed weights: copies of four bits take about four times as much."""
    report = planned("mistral-7b-awq", "rtx-4090", dtype="float16")
    assert report.plan is not None
    assert report.model is not None
    assert 2.5 * report.model.weights_bytes < report.plan.copies_bytes < 4 * report.model.weights_bytes
    held = report.model.weights_bytes + report.plan.copies_bytes + report.model.kv_bytes
    assert held < KNOWN["rtx-4090"].memory_bytes - CONTEXT_BYTES


def test_what_is_not_fused_is_told_with_its_reason() -> None:
    report = planned("mistral-7b", "l4", dtype="float16")
    assert report.plan is not None
    assert (report.plan.path, report.plan.tokens_per_second) == ("portable", None)
    assert report.decoders[0].reason == "the model is float16, the kernels compute in bfloat16"
    assert [one.name for one in report.decoders if one.chosen] == ["portable"]
    assert plan_of("mistral-7b", "l4", decoder="eager").kernels.count == 0


def test_a_model_that_has_no_room() -> None:
    (problem,) = planned("mistral-7b", "rtx-3070").problems
    assert problem == "the weights take 13.5 GiB, 7.5 of this GPU are free; use fewer bits"


def test_a_decoder_that_could_not_serve(tmp_path: Path) -> None:
    (problem,) = planned("mistral-7b", "l4", dtype="float16", decoder="graph").problems
    assert "decoder 'graph' cannot serve this model" in problem
    raw = json.loads((MODELS / "qwen3-0.6b-awq" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "hidden_size": 1000}))
    (problem,) = examine_gpu(EngineSettings(model=str(tmp_path)), "l4").problems
    assert "expected what divides the 1000 inputs" in problem


def test_names() -> None:
    assert known_gpu("SM_90a") is known_gpu("sm_90") is known_gpu("H100") is KNOWN["h100"]
    assert {f"sm_{major}{minor}" for major, minor in SERVERS} == {one.architecture for one in KNOWN.values()}
    for capability, counts in SERVERS.items():
        name = f"sm_{capability[0]}{capability[1]}"
        assert known_gpu(name).architecture == name
        assert set(counts).intersection(one.multiprocessors for one in KNOWN.values())
    assert all(one.capability in SHARED for one in KNOWN.values())
    for name in ("", "sm_70", "gtx-1080", "h10", "sm_"):
        with pytest.raises(Unsupported, match=r"is not known; use one of rtx-3060, .*, sm_120"):
            known_gpu(name)


def test_it_prints_one_object(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.main(["--gpu", "a10", "--model", str(MODELS / "qwen3-0.6b")]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["gpu"]["title"] == "A10"
    assert doctor.main(["--gpu", "none", "--model", str(MODELS / "qwen3-0.6b")]) == 1
    assert json.loads(capsys.readouterr().out)["plan"] is None
