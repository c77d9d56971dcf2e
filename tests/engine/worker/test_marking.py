"""What is left of a step for those who outlive it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from engine.fake import plain_request
from engine.ipc.step_mark import MarkedStep, StepMark
from engine.scheduling.plan import Admitted, Released, Row, StepPlan
from engine.worker.marking import Marking


@pytest.fixture
def ends() -> Iterator[tuple[Marking, StepMark]]:
    """The engine's end and the front's."""
    fd = StepMark.create()
    yield Marking(StepMark(fd)), StepMark(fd)
    os.close(fd)


def admitted(key: int, slot: int) -> Admitted:
    plain = plain_request((1, 2))
    return Admitted(key, slot, plain.token_ids, 2, plain.sampling, plain.stopping)


def row(key: int, slot: int) -> Row:
    return Row(key, slot, 0, 2, True)


def test_a_step_of_several_names_those_who_hold_slots(ends: tuple[Marking, StepMark]) -> None:
    marking, mark = ends
    assert mark.read() == MarkedStep()
    marking.begin(StepPlan((row(7, 0), row(8, 1)), (admitted(7, 0), admitted(8, 1), admitted(9, 1023))))
    assert mark.read() == MarkedStep((7, 8, 9))
    marking.end()
    assert mark.read() == MarkedStep()
    marking.begin(StepPlan((row(7, 0), row(10, 1)), (admitted(10, 1),), (Released(8, 1), Released(9, 1023))))
    assert mark.read() == MarkedStep((7, 10))


def test_one_of_one_names_that_one(ends: tuple[Marking, StepMark]) -> None:
    marking, mark = ends
    marking.begin(StepPlan((row(7, 0), row(8, 1)), (admitted(7, 0), admitted(8, 1))))
    marking.begin(StepPlan((row(8, 1),)))
    assert mark.read() == MarkedStep((8,), alone=True)


def test_a_release_that_is_said_again_takes_nothing_from_the_next_holder(ends: tuple[Marking, StepMark]) -> None:
    marking, mark = ends
    marking.begin(StepPlan((row(7, 0),), (admitted(7, 0),)))
    marking.begin(StepPlan((row(8, 0),), (admitted(8, 0),), (Released(7, 0),)))
    marking.begin(StepPlan((row(8, 0), row(9, 1)), (admitted(9, 1),), (Released(7, 0),)))
    assert mark.read() == MarkedStep((8, 9))
