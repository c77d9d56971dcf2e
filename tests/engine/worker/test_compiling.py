"""Requests whose constraint is being compiled: nobody waits with them, and they may leave."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from engine.api import Constraint
from engine.constraints.constraints import Constraints
from engine.execution.batched.executor import can_choose
from engine.execution.graph_decode.pipeline import can_sample
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
        self.begun: list[Future[None]] = []

    def compile(self, grammar: str) -> Future[None]:
        self.begun.append(Future())
        return self.begun[-1]


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
    slow.begun[0].set_result(None)
    assert compiling.collect() == []
    assert (scheduler.live, compiling.waiting) == (2, False)


def test_one_that_is_cancelled_meanwhile_never_comes(scheduler: Scheduler) -> None:
    slow = Slow()
    compiling = Compiling(scheduler, slow)
    compiling.admit(asked(1))
    compiling.cancel(1)
    slow.begun[0].set_result(None)
    assert compiling.collect() == []
    assert not scheduler.live
    compiling.admit(asked(2, None))
    compiling.cancel(2)
    assert not scheduler.live


def test_one_that_can_never_run_ends_alone(scheduler: Scheduler) -> None:
    slow = Slow()
    compiling = Compiling(scheduler, slow)
    compiling.admit(asked(1))
    compiling.admit(asked(2, prompt=tuple(range(99))))
    slow.begun[0].set_exception(OSError("no tokenizer.json"))
    slow.begun[1].set_result(None)
    assert compiling.collect() == [
        Event(1, failure=Failure.CONSTRAINT),
        Event(2, failure=Failure.CONSTRAINT),
    ]
    assert not scheduler.live


def test_a_vocabulary_that_is_not_there_fails_each_who_asks(scheduler: Scheduler) -> None:
    constraints = Constraints("/no/such/folder")
    for _ in range(2):
        assert isinstance(constraints.compile("x").exception(60), OSError)
    constraints.close()


def test_no_step_is_launched_ahead_for_a_constrained_row() -> None:
    """Its mask must come first."""
    state = begin(admission_of(asked(1)))
    assert not (can_choose(state))
    assert not (can_sample(state))
