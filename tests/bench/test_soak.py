"""The soak end to end on the demo model, and that it would notice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import soak
from bench.soak import SoakRecord
from engine.scheduling.plan import RowResult, StepPlan, StepResult

pytestmark = pytest.mark.proof

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


class SteadyClock:
    """Half a second a look, so that a run has as many rounds on any machine."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 0.5
        return self._now


def test_nothing_drifts_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "time", SteadyClock())
    asked = [f"--model={DEMO}", "--seconds=3", "--interval=0", "--tokens=8", "--longest=24", "--revision=abc"]
    assert soak.main(asked) == 0
    *lines, record = capsys.readouterr().out.splitlines()
    found = json.loads(record)
    assert len(lines) >= 3
    assert (found["changed"], found["grown_bytes"], found["decoder"]) == (0, 0, "eager")
    assert found["answers"] > soak.QUESTIONS
    assert found["left"] > 0


def test_an_answer_that_changes_is_seen() -> None:
    record = SoakRecord()
    question = soak.questions(100, 4, 9)[0]
    record.take(question, [1, 2])
    record.take(question, [1, 2])
    record.take(question, [1, 3])
    assert (record.whole, record.changed) == (3, {0: 1})


def test_a_model_that_drifts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids of late steps are others: the exit code says so."""
    made, steps = soak.build, 0
    first = soak.QUESTIONS * 8  # steps in which every question is asked for the first time

    def drifting(settings: object, progress: object) -> object:
        runner = made(settings, progress)  # type: ignore[arg-type]
        run = runner.run

        def other(plan: StepPlan) -> StepResult:
            nonlocal steps
            steps += 1
            result = run(plan)
            if steps <= first:
                return result
            return StepResult({key: RowResult((row.token_ids[0] ^ 1,)) for key, row in result.rows.items()})

        monkeypatch.setattr(runner, "run", other)
        return runner

    monkeypatch.setattr(soak, "build", drifting)
    assert soak.main([f"--model={DEMO}", "--seconds=0", "--tokens=8", "--longest=24"]) == 1
    assert steps > first


def test_questions_are_always_the_same() -> None:
    assert soak.questions(500, 8, 40) == soak.questions(500, 8, 40)
