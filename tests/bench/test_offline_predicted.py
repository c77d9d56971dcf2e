"""What was foretold of workloads that were measured is what they took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.offline import MISTRAL, QWEN, StepTimes, predict
from bench.offline import predict_main as main
from bench.workloads import workload

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "throughput-h100.json"
MEASURED = {
    (one["model"], one["workload"]): one["output_tokens_per_second"]
    for one in json.loads(RESULTS.read_text())
    if one["path"] == "offline" and one["revision"] == "996914c-dirty"
}
TIMES = StepTimes(rows=((1, 2.0), (9, 10.0)), prompts=((16, 1.0), (2048, 21.0)), token_bytes=2750)


@pytest.mark.parametrize(("model", "times"), [("qwen3-0.6b", QWEN), ("mistral-7b-awq", MISTRAL)])
@pytest.mark.parametrize("name", ["n16", "n64", "n256"])
def test_steps_as_they_were_measured_make_the_rates_that_were_measured(model: str, times: StepTimes, name: str) -> None:
    found = predict(times, workload(name, 128, 128), budget=2048, most_rows=256)
    assert found.tokens_per_second == pytest.approx(MEASURED[model, name], rel=0.08)


def test_a_step_takes_what_its_rows_and_prompts_take() -> None:
    assert TIMES.step(0, 0) == 0
    assert TIMES.step(5, 5 * 192) == pytest.approx(6.0)
    assert TIMES.step(5, 5 * 192 + 2_000_000) == pytest.approx(8.0)
    assert TIMES.prompt(3) == 1.0
    assert TIMES.prompt(2 * 2048 + 1032) == pytest.approx(42 + 11, abs=0.1)


def test_one_request_step_by_step() -> None:
    found = predict(TIMES, [(100, 4)], budget=64, most_rows=8)
    assert found.steps == 5  # two chunks of a prompt, then three tokens after the first
    context = sum(length - 192 for length in (101, 102, 103)) * 2750 / 2.75e9
    assert found.first_ms_p95 == pytest.approx(TIMES.prompt(64) + TIMES.prompt(36))
    assert 4e3 / found.tokens_per_second == pytest.approx(found.first_ms_p95 + 3 * 2.0 + context)


def test_a_target_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    loose = predict(QWEN, workload("n256", 128, 64), budget=2048, most_rows=256)
    tight = predict(QWEN, workload("n256", 128, 64), budget=2048, most_rows=256, target=3.0)
    assert loose.gap_ms_most > 10 > 2 * tight.gap_ms_most
    assert tight.tokens_per_second < loose.tokens_per_second
    asked = ["--models", "qwen3-0.6b", "--workloads", "n2", "--rows", "4", "--budgets", "64", "--targets", "3"]
    assert main(asked) == 0
    assert "target   3.0" in capsys.readouterr().out
