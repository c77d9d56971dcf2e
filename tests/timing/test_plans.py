"""What a step is planned in, beside what it takes to run it."""

from __future__ import annotations

import statistics
import time

from engine.api import Priority
from engine.fake import plain_request
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.plan import RowResult, StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence


class Crowd:
    """One sequence that is watched beside so many of the background. Steps bring zeros."""

    def __init__(self, background: int) -> None:
        limits = Limits(max_sequences=1024, max_batch_tokens=8192, max_context=4096)
        self.scheduler, self.now = Scheduler(limits, PagePool(65_536)), 100.0
        for key in range(background + 1):
            priority = Priority.BACKGROUND if key else Priority.INTERACTIVE
            request = plain_request((1, 2, 3, 4), 4000, arrived_at=self.now, priority=priority)
            self.scheduler.admit(Sequence(request, list(request.token_ids), key=key))
        while self.step()[1] > 1e-3 or self.scheduler.load.waiting:
            pass

    def step(self) -> tuple[float, float]:
        """Seconds that its plan took, and seconds of its make-believe run."""
        began = time.perf_counter()
        plan = self.scheduler.plan(self.now)
        took = time.perf_counter() - began
        assert plan is not None
        run = 0.0005 * len(plan.rows)  # no two of the background are worth it
        self.now += run
        self.scheduler.commit(plan, _zeros(plan), self.now)
        return took, run


def _zeros(plan: StepPlan) -> StepResult:
    return StepResult({row.key: RowResult((0,)) for row in plan.rows if row.sample})


def test_a_step_beside_hundreds_of_the_background_is_planned_as_fast_as_beside_a_few() -> None:
    """All of them were looked at in each step once: 0.6 ms with 512, where the step of one row takes 0.5."""
    few, many = Crowd(16), Crowd(800)
    takes: dict[Crowd, list[float]] = {few: [], many: []}
    for _ in range(300):
        for crowd, taken in takes.items():
            taken.append(crowd.step()[0])
    assert statistics.median(takes[many]) < 10 * statistics.median(takes[few])
