"""Who is fed where not everybody is: solos, and steps that find no memory or raise."""

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


def starved(bench: Bench, fails: Callable[[StepPlan, int], bool], late: bool, *, raises: bool = False) -> int:
    """Runs to the end; where `fails` says so of a plan and its number, there is no memory, before anything is computed
    or after all is. Returns how often. `raises`: the step raises something else."""
    count, failed = 0, bench.scheduler.raised if raises else bench.scheduler.out_of_memory
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
            bench.take(failed(plan))
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


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("guilty", [(1,), (4,), (8,), (2, 3), (1, 8), (1, 2, 5, 6)])
def test_a_row_that_raises_ends_and_no_other(guilty: tuple[int, ...], late: bool) -> None:
    """Six at most run at once: found in halves, a row makes four steps raise at most, itself alone included."""
    bench = crowd(ids=1)
    expected = {key: alone(one.request, PAGES) for key, one in bench.sequences.items()}
    count = starved(bench, lambda plan, number: bool({*guilty} & {*keys_of(plan)}), late, raises=True)
    assert count <= 4 * len(guilty)
    for key in guilty:
        assert bench.events.pop(key) == [Event(key, failure=Failure.STEP)]
    assert {key: bench.output(key) for key in bench.events} == {key: expected[key] for key in bench.events}


def test_one_of_many_is_found_in_few_steps() -> None:
    bench = Bench(sequences=128, batch=4096, pages=512)
    keys = [bench.admit(prompt=9, output=6) for _ in range(128)]
    for _ in range(3):
        bench.step()
    number = 0
    while not bench.events[77][-1].failure:
        plan = bench.scheduler.plan(bench.now)
        assert plan is not None
        number += 1
        if 77 in keys_of(plan):
            bench.take(bench.scheduler.raised(plan))
        else:
            bench.take(bench.scheduler.commit(plan, bench.runner.run(plan), bench.now))
    assert number <= 1 + 2 * 7
    bench.run()
    assert all(bench.output(key) == alone(bench.sequences[key].request, 32) for key in keys if key != 77)


def test_rows_that_raise_only_together_lose_nothing_but_time() -> None:
    bench = crowd(ids=1)
    expected = [alone(one.request, PAGES) for one in bench.sequences.values()]
    assert starved(bench, lambda plan, number: {2, 3} <= {*keys_of(plan)}, late=True, raises=True) > 10
    assert [bench.output(key) for key in bench.sequences] == expected


def test_an_admission_that_raises_costs_its_own_sequence() -> None:
    """Whoever is not fed by a step is not admitted by it either."""
    bench = crowd(ids=1)
    expected = [alone(one.request, PAGES) for one in bench.sequences.values()]
    starved(bench, lambda plan, number: 4 in {one.key for one in plan.admitted}, late=False, raises=True)
    assert bench.events.pop(4) == [Event(4, failure=Failure.STEP)]
    del expected[3]
    assert [bench.output(key) for key in bench.events] == expected
