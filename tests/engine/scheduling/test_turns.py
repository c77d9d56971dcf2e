"""Who is fed where not everybody is: solos, and steps that find no memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from engine.ipc.events import Event, Failure
from engine.scheduling.plan import StepPlan
from tests.engine.scheduled import Bench, alone, rows_of, sent

PAGES = 64


def keys_of(plan: StepPlan | None) -> list[int]:
    return [] if plan is None else [row.key for row in plan.rows]


def test_a_trial_is_run_alone_in_turns_with_the_others() -> None:
    bench = Bench(batch=16, pages=PAGES)
    bench.admit(prompt=5, output=9)
    bench.admit(prompt=40, output=9, solo=(0, 3))
    bench.admit(prompt=5, output=9)
    steps = [keys_of(bench.step()) for _ in range(11)]
    assert steps == [[2], [1, 3]] * 4 + [[2], [1, 2, 3], [1, 2, 3]], (
        "three chunks of a prompt, two tokens more, and it is over"
    )
    bench.run()
    for key in (1, 2, 3):
        assert bench.output(key) == alone(bench.sequences[key].request, PAGES)


def test_one_may_begin_in_the_middle_of_an_answer() -> None:
    bench = Bench(pages=PAGES)
    bench.admit(output=9, solo=(2, 4))
    bench.admit(output=9)
    assert [keys_of(bench.step()) for _ in range(7)] == [[1, 2], [1, 2], [1], [2], [1], [1, 2], [1, 2]]


def test_solos_come_one_after_another_and_need_no_company() -> None:
    bench = Bench(pages=PAGES)
    for _ in range(2):
        bench.admit(output=4, solo=(0, 2))
    assert [keys_of(bench.step()) for _ in range(7)] == [[1], [1], [2], [1], [2], [1, 2], [2]]


def test_a_paused_one_holds_nobody_up() -> None:
    bench = Bench(pages=PAGES)
    solo, other = bench.admit(output=4, solo=(0, 2)), bench.admit(output=4)
    bench.step()
    bench.scheduler.pause(solo)
    assert [keys_of(bench.step()) for _ in range(2)] == [[other]] * 2
    bench.scheduler.resume(solo)
    bench.scheduler.pause(other)
    assert keys_of(bench.step()) == [solo]


def starved(bench: Bench, fails: Callable[[StepPlan, int], bool], late: bool) -> int:
    """Runs to the end; where `fails` says so of a plan and its number, there is no memory, before anything is computed
    or after all is. Returns how often."""
    count = 0
    for number in itertools.count(1):
        bench.now += 0.01
        plan = bench.scheduler.plan(bench.now)
        if plan is None:
            return count
        assert number < 5000
        if fails(plan, number):
            count += 1
            if late:
                bench.runner.run(sent(plan))
            bench.take(bench.scheduler.out_of_memory(plan))
        else:
            bench.take(bench.scheduler.commit(plan, sent(bench.runner.run(sent(plan))), bench.now))
    raise AssertionError


def crowd(ids: int) -> Bench:
    bench = Bench(sequences=6, batch=64, pages=PAGES, ids=ids)
    for number in range(8):
        bench.admit(prompt=7 + 23 * number, output=40 + 9 * number)
    return bench


@pytest.mark.parametrize("ids", [1, 4])
def test_a_lack_of_memory_at_any_step_changes_no_answer(ids: int) -> None:
    expected = [alone(one.request, PAGES) for one in crowd(ids).sequences.values()]
    for at in range(1, 36, 2):
        bench = crowd(ids)
        assert starved(bench, lambda plan, number, at=at: number == at, late=at % 4 == 1) == 1
        assert [bench.output(key) for key in bench.sequences] == expected, at


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_nor_does_one_at_each_of_a_hundred_steps(late: bool) -> None:
    """Each is tried again, with fewer rows or the same."""
    bench = crowd(ids=1)
    expected = [alone(one.request, PAGES) for one in bench.sequences.values()]
    assert starved(bench, lambda plan, number: number % 2 == 1, late) > 100
    assert [bench.output(key) for key in bench.sequences] == expected


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_row_that_never_finds_memory_ends_and_no_other(late: bool) -> None:
    bench = crowd(ids=1)
    expected = [alone(one.request, PAGES) for one in bench.sequences.values()]
    starved(bench, lambda plan, number: 4 in keys_of(plan), late)
    assert bench.events.pop(4) == [Event(4, failure=Failure.MEMORY)]
    del expected[3]
    assert [bench.output(key) for key in bench.events] == expected


def test_a_prompt_goes_on_in_chunks_for_which_there_is_memory() -> None:
    """And in longer ones again, after a while."""
    bench = Bench(batch=256, pages=PAGES)
    key = bench.admit(prompt=900, output=60)
    starved(bench, lambda plan, number: sum(row.count for row in plan.rows) > 100, late=False)
    assert bench.output(key) == alone(bench.sequences[key].request, PAGES)
    bench.admit(prompt=900)
    assert rows_of(bench.scheduler.plan(bench.now)) == {2: (0, 256, False)}
