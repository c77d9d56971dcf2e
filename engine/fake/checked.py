"""Checks the plans and results of any runner."""

from __future__ import annotations

from collections.abc import Callable

from engine.api import ModelInfo
from engine.fake.checker import PlanChecker
from engine.fake.pages import TrustedPages
from engine.scheduling.plan import Assignment, Runner, StepPlan, StepResult


class CheckedRunner:
    """Raises BrokenPlan before the wrapped `Runner` gets a wrong plan."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self.checker = PlanChecker(inner.info.total_pages, inner.info.max_sequences)
        self._pages = TrustedPages(inner.pages, self.checker)

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    @property
    def pages(self) -> TrustedPages:
        return self._pages

    def run(self, plan: StepPlan, assignment: Assignment | None = None) -> StepResult:
        self.checker.begin(plan)
        for row in plan.rows:
            self.checker.feed(row)
        result = self._inner.run(plan, assignment)
        self.checker.result(plan, result)
        return result

    def meanwhile(self, piece: Callable[[], bool]) -> None:
        self._inner.meanwhile(piece)

    def set_optimization(self, name: str, enabled: bool) -> None:
        self._inner.set_optimization(name, enabled)

    def close(self) -> None:
        self._inner.close()
