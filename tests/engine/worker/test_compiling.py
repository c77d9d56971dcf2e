"""Requests whose constraint is being compiled: nobody waits with them, and they may leave."""

from __future__ import annotations

import time

import pytest

from engine.api import Constraint
from engine.constraints.constraints import Constraints
from engine.constraints.reasons import ConstraintReason
from engine.execution.needs import chosen_by_kernels
from engine.fake import plain_request
from engine.ipc.events import Event, Failure
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.rows import admission_of
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_state import begin
from engine.worker.compiling import Compiling

FORM = Constraint("x")


class Slow(Constraints):
    """Compiles when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.done: set[int] = set()
        self.broken: dict[int, ConstraintReason] = {}
        self.live: set[int] = set()

    def begin_compiling(self, key: int, constraint: Constraint, stops: tuple[int, ...], forcing: bool) -> None:
        self.live.add(key)

    def compiled(self, key: int) -> bool:
        return key in self.done or key in self.broken

    def failure(self, key: int) -> ConstraintReason | None:
        return self.broken.get(key)

    def forget(self, key: int) -> None:
        self.live.discard(key)


def asked(key: int, constraint: Constraint | None = FORM, prompt: tuple[int, ...] = (1, 2)) -> Sequence:
    return Sequence(plain_request(prompt, constraint=constraint), list(prompt), key=key)


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(Limits(max_sequences=4, max_batch_tokens=64, max_context=64), PagePool(16))


def test_only_those_with_a_constraint_wait_for_it(scheduler: Scheduler) -> None:
    slow = Slow()
    compiling = Compiling(scheduler, slow)
    compiling.admit(asked(1))
    compiling.admit(asked(2, None))
    assert (scheduler.live, compiling.waiting, compiling.collect()) == (1, True, [])
    slow.done.add(1)
    assert compiling.collect() == []
    assert (scheduler.live, compiling.waiting) == (2, False)


def test_one_that_is_cancelled_meanwhile_never_comes(scheduler: Scheduler) -> None:
    slow = Slow()
    compiling = Compiling(scheduler, slow)
    compiling.admit(asked(1))
    compiling.cancel(1)
    slow.done.add(1)
    assert compiling.collect() == []
    assert not scheduler.live
    assert not slow.live
    compiling.admit(asked(2, None))
    compiling.cancel(2)
    assert not scheduler.live


def test_one_that_can_never_run_ends_alone(scheduler: Scheduler) -> None:
    slow = Slow()
    compiling = Compiling(scheduler, slow)
    for key in (1, 2, 3):
        compiling.admit(asked(key))
    compiling.admit(asked(4, prompt=tuple(range(99))))
    slow.broken = {1: ConstraintReason.UNMET, 2: ConstraintReason.TIME, 3: ConstraintReason.REFUSED}
    slow.done.add(4)
    found = compiling.collect()
    assert found == [
        Event(1, failure=Failure.CONSTRAINT),
        Event(2, failure=Failure.CONSTRAINT_COST),
        Event(3, failure=Failure.CONSTRAINT_COST),
        Event(4, failure=Failure.STEP),
    ]
    assert not scheduler.live
    compiling.ended(found)
    assert not slow.live


@pytest.mark.product
def test_a_vocabulary_that_is_not_there_fails_each_who_asks(scheduler: Scheduler) -> None:
    constraints = Constraints("/no/such/folder")
    compiling = Compiling(scheduler, constraints)
    for key in (1, 2):
        compiling.admit(asked(key))
        while not (found := compiling.collect()):
            time.sleep(0.001)
        assert found == [Event(key, failure=Failure.CONSTRAINT)]
        compiling.ended(found)
    constraints.close()


def test_no_step_is_launched_ahead_for_a_constrained_row() -> None:
    """Its mask must come first."""
    state = begin(admission_of(asked(1)))
    assert not chosen_by_kernels(state)
