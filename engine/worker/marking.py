"""Keeps the step mark: says before each step whom it is run for."""

from __future__ import annotations

from engine.ipc.step_mark import StepMark
from engine.scheduling.plan import StepPlan


class Marking:
    """Follows plans. Those who hold a slot stand for the rows of a step of several, since they change rarely."""

    def __init__(self, mark: StepMark) -> None:
        self._mark = mark

    def begin(self, plan: StepPlan) -> None:
        """A step begins."""
        mark = self._mark
        for released in plan.released:
            if mark.holder(released.slot) == released.key:
                mark.hold(released.slot, 0)
        for admitted in plan.admitted:
            mark.hold(admitted.slot, admitted.key)
        mark.begin(plan.rows[0].key if len(plan.rows) == 1 else None)

    def end(self) -> None:
        """It has come back, or failed."""
        self._mark.end()
