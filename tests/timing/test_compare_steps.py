"""A step loop of a real model that is five per cent slower is found ten times of ten, and nothing is found where
nothing was changed. There the clock is a drawn one with the swings of a busy machine, since a busy machine must not
turn a test red; a sleep that no machine hides is also found on the clock of the thread."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.compare import TOLERANCE, changes, interleave, regressions
from bench.turns import LocalModel, RoundFigures, round_of

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-draft"
TOKENS, TIMES, ROUNDS = 24, 10, 60


class ThreadTime:
    """What the thread took, with a sleep after each step that is a share of the step."""

    def __init__(self) -> None:
        self._slept = 0.0

    def now(self) -> float:
        return time.thread_time() + self._slept

    def pass_step(self, began: float, share: float) -> None:
        self._slept += share * (self.now() - began)


class DrawnTime:
    """What a busy machine might take: its frequency wanders, each step swings by six per cent, and one of thirty is
    interrupted for longer than it runs."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._pace = 1.0
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def pass_step(self, began: float, share: float) -> None:
        self._pace = min(1.5, max(0.7, self._pace * self._random.gauss(1, 0.005)))
        interrupted = self._random.random() < 1 / 30
        swing = self._random.gauss(1, 0.06) * (self._random.uniform(1, 3) if interrupted else 1)
        self._now += 300e-6 * self._pace * swing * (1 + share)


class TimedRunner:
    """A runner whose steps pass on a clock and are longer by a share."""

    def __init__(self, runner: Any, clock: ThreadTime | DrawnTime, share: float) -> None:
        self._runner = runner
        self._clock = clock
        self._share = share

    def run(self, plan: Any, assignment: Any = None) -> Any:
        began = self._clock.now()
        results = self._runner.run(plan)
        self._clock.pass_step(began, self._share)
        return results


class Side:
    """Rounds of the loop on such a clock."""

    def __init__(self, loop: LocalModel, clock: ThreadTime | DrawnTime, share: float) -> None:
        self._loop = loop
        self._clock = clock
        self._share = share

    def __call__(self) -> Mapping[str, float]:
        scheduler, runner = self._loop.scheduler(), TimedRunner(self._loop.runner, self._clock, self._share)
        found: RoundFigures = round_of(
            scheduler, runner, lambda: self._loop.admit(scheduler), TOKENS, 1, self._clock.now
        )
        return asdict(found)


@pytest.fixture(scope="module")
def loop() -> LocalModel:
    return LocalModel(str(DEMO), 1, TOKENS, threads=1)


def found(loop: LocalModel, clock: ThreadTime | DrawnTime, share: float, tolerance: float = TOLERANCE) -> bool:
    before, after = interleave(Side(loop, clock, 0.0), Side(loop, clock, share), ROUNDS)
    return bool(regressions(changes(before, after, paired=True)[:1], tolerance))


def test_five_per_cent_are_found_on_a_busy_machine_and_nothing_where_nothing_changed(loop: LocalModel) -> None:
    assert [found(loop, DrawnTime(seed), 0.05) for seed in range(TIMES)] == [True] * TIMES
    assert [found(loop, DrawnTime(seed), 0.0) for seed in range(TIMES)] == [False] * TIMES


def test_a_sleep_of_half_a_step_is_found_on_the_clock_of_the_thread_and_none_where_none_is(loop: LocalModel) -> None:
    assert found(loop, ThreadTime(), 0.5, tolerance=0.1)
    assert not found(loop, ThreadTime(), 0.0, tolerance=0.1)
