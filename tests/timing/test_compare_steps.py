"""A sleep of five per cent in the step loop of a real model is found ten times of ten, and nothing is found where
nothing was changed. The clock is this thread's own, to which the sleep is added: what else the machine does is not in
it, but for caches that others empty."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.compare import TOLERANCE, changes, interleave, regressions
from bench.turns import LocalModel, RoundFigures, round_of

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-draft"
TOKENS, TIMES = 24, 10
ROUNDS = 60  # enough for an interval of a per cent beside other load; `whippet bench compare` takes --rounds


class Sleepy:
    """A runner behind which every step sleeps, on a clock that knows of it."""

    def __init__(self, runner: Any, seconds: float) -> None:
        self._runner = runner
        self._seconds = seconds
        self._slept = 0.0

    def run(self, plan: Any, assignment: Any = None) -> Any:
        self._slept += self._seconds
        return self._runner.run(plan)

    def clock(self) -> float:
        return time.thread_time() + self._slept


class Side:
    """Rounds of the loop with such a sleep."""

    def __init__(self, loop: LocalModel, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds

    def __call__(self) -> Mapping[str, float]:
        scheduler, runner = self._loop.scheduler(), Sleepy(self._loop.runner, self._seconds)
        found: RoundFigures = round_of(scheduler, runner, lambda: self._loop.admit(scheduler), TOKENS, 1, runner.clock)
        return asdict(found)


@pytest.fixture(scope="module")
def loop() -> LocalModel:
    return LocalModel(str(DEMO), 1, TOKENS, threads=1)


def found(loop: LocalModel, seconds: float) -> bool:
    before, after = interleave(Side(loop, 0.0), Side(loop, seconds), ROUNDS)
    return bool(regressions(changes(before, after, paired=True)[:1], TOLERANCE))


def test_a_sleep_of_five_per_cent_is_found_and_nothing_where_there_is_none(loop: LocalModel) -> None:
    warm = [Side(loop, 0.0)()["step_us"] for _ in range(5)]
    slow = 0.05 * sorted(warm)[2] / 1e6
    assert [found(loop, slow) for _ in range(TIMES)] == [True] * TIMES
    assert [found(loop, 0.0) for _ in range(TIMES)] == [False] * TIMES
