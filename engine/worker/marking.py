"""Keeps the step mark: says before each step whom it is run for."""

from __future__ import annotations

from engine.ipc.step_mark import StepMark
from engine.scheduling.plan import StepPlan


class Marking:
    """Follows plans. Those who hold a slot stand for the rows of a step of several, since they change rarely."""

    def __init__(self, mark: StepMark) -> None:
        self._mark = mark
        self._held: dict[int, int] = {}  # slot → key

    def begin(self, plan: StepPlan) -> None:
        if plan.admitted or plan.released:
            for released in plan.released:
                if self._held.get(released.slot) == released.key:
                    del self._held[released.slot]
            for admitted in plan.admitted:
                self._held[admitted.slot] = admitted.key
            self._mark.held_by(self._held.values())
        self._mark.begin(plan.rows[0].key if len(plan.rows) == 1 else None)

    def end(self) -> None:
        self._mark.end()
