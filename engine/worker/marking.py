"""Writes the step mark: before each step, the sequences that it runs for."""

from __future__ import annotations

from engine.ipc.step_mark import StepMark
from engine.scheduling.plan import StepPlan


class Marking:
    """Holders of slots stand for the rows of a step of several, since they change rarely."""

    def __init__(self, mark: StepMark) -> None:
        self._mark = mark

    def begin(self, plan: StepPlan) -> None:
        mark = self._mark
        for released in plan.released:
            if mark.holder(released.slot) == released.key:
                mark.hold(released.slot, 0)
        for admitted in plan.admitted:
            mark.hold(admitted.slot, admitted.key)
        mark.begin(plan.rows[0].key if len(plan.rows) == 1 else None)

    def end(self) -> None:
        self._mark.end()
