"""What the loop does while a step runs."""

from __future__ import annotations

from collections.abc import Callable

from engine.fake import FakeRunner, plain_request
from engine.ipc.frames import SetSwitch, Submit, Switched
from engine.scheduling.plan import Assignment, StepPlan, StepResult
from tests.engine.worker.loops import Front


class Watched(FakeRunner):
    """In its first step it does what the test says, and nothing meanwhile of its own accord."""

    in_step: Callable[[Callable[[], bool]], None]

    def meanwhile(self, piece: Callable[[], bool]) -> None:
        self.piece = piece

    def run(self, plan: StepPlan, assignment: Assignment | None = None) -> StepResult:
        in_step, self.in_step = self.in_step, lambda piece: None
        in_step(self.piece)
        return super().run(plan)


def during_a_step(in_step: Callable[[Front, Callable[[], bool]], None]) -> Front:
    """A front whose first request, of one token, is in a step in which this is done."""
    front = Front(runner=Watched)
    assert isinstance(front.runner, Watched)
    front.runner.in_step = lambda piece: in_step(front, piece)
    front.send(Submit(1, plain_request((5,), max_tokens=1)))
    return front


def test_a_prompt_that_comes_during_a_step_has_its_slot_before_the_end() -> None:
    def in_step(front: Front, piece: Callable[[], bool]) -> None:
        assert not piece(), "nothing has come"
        front.send(Submit(2, plain_request((6,) * 20, 3)))
        assert piece()
        assert front.scheduler.load.running == 2
        assert not piece()

    front = during_a_step(in_step)
    front.read_to_end(2)
    assert [[event.key for event in step] for step in front.steps()] == [[1], [2], [2], [2]]
    front.close()


def test_a_switch_that_comes_during_a_step_is_set_behind_it() -> None:
    def in_step(front: Front, piece: Callable[[], bool]) -> None:
        front.send(SetSwitch(9, "batching", False), Submit(2, plain_request((6,), 3)))
        assert not piece()

    front = during_a_step(in_step)
    front.read_to_end(2)
    assert front.seen[1] == Switched(9, None, 1), "behind the step, before the next"
    front.close()
