"""How a sequence ends: by itself, by the clock, by a fault, by its caller; and what never begins."""

from __future__ import annotations

import dataclasses

import pytest

from engine.api import FinishReason, Stopping, TokenLogprob
from engine.fake import plain_request
from engine.ipc.events import Event, Failure
from engine.kv.page_pool import PagePool
from engine.scheduling.outcome import take
from engine.scheduling.plan import RowResult, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from tests.engine.scheduled import Bench, alone, rows_of
from tests.engine.stepped import whole


@pytest.mark.parametrize("running", [True, False])
def test_deadline_and_budget_hold_running_and_waiting(running: bool) -> None:
    bench = Bench(sequences=2 if running else 1)
    if not running:
        bench.admit(output=100)
    late = bench.admit(output=100, deadline=bench.now + 1.0)
    if running:
        budget = bench.admit(output=100, expires_at=bench.now + 0.5, deadline=bench.now + 0.6)
    else:
        budget = bench.admit(output=100, expires_at=bench.now + 0.5)
    bench.step(0.4)
    assert not bench.ended(late)
    assert not bench.ended(budget)
    bench.step(0.15)
    assert bench.reason(budget) is FinishReason.TIME_BUDGET
    assert bool(bench.output(budget)) is running
    bench.step(0.5)
    assert bench.events[late][-1].failure is Failure.DEADLINE
    bench.run()
    assert bench.scheduler.load.used_pages == 0


def test_stop_tokens_end_it_and_are_the_last_id() -> None:
    bench = Bench(pages=64)
    key = bench.admit(output=900, stopping=Stopping(max_tokens=900, stop_token_ids=(7,)))
    bench.run()
    finish = bench.events[key][-1].finish
    assert finish is not None
    assert (finish.reason, finish.stop_token_id) == (FinishReason.STOP, 7)
    assert bench.output(key)[-1] == 7
    assert 7 not in bench.output(key)[:-1]


@pytest.mark.parametrize("ids", [1, 5])
def test_min_tokens_holds_stops_back_and_max_tokens_is_exact(ids: int) -> None:
    stops = tuple(range(32, 127))
    bench = Bench(ids=ids)
    key = bench.admit(stopping=Stopping(max_tokens=50, min_tokens=12, stop_token_ids=stops))
    limited = bench.admit(output=13)
    bench.run()
    assert len(bench.output(key)) == 13
    assert bench.reason(key) is FinishReason.STOP
    assert len(bench.output(limited)) == 13
    assert bench.reason(limited) is FinishReason.LENGTH


def test_no_logprob_comes_after_the_end() -> None:
    sequence = Sequence(plain_request((1, 2), 2), [1, 2], slot=0, pages=[0])
    told = tuple(TokenLogprob(logprob=-float(at), top=()) for at in range(3))
    event = take(sequence, whole(sequence), RowResult((5, 6, 7), told), 100, 1.0)
    assert (event.token_ids, event.logprobs) == ((5, 6), told[:2])
    assert event.finish is not None


@pytest.mark.parametrize("ids", [1, 3, 20])
def test_the_end_of_the_context_is_a_normal_end(ids: int) -> None:
    bench = Bench(pages=2, ids=ids)
    key = bench.admit(prompt=20, output=500)
    bench.run()
    assert bench.reason(key) is FinishReason.LENGTH
    assert len(bench.output(key)) == 32 - 20
    full = bench.admit(prompt=31, output=500)
    bench.run()
    assert len(bench.output(full)) == 1


def test_what_can_never_run_is_refused() -> None:
    bench = Bench(pages=2)
    for prompt in (0, 32, 33):
        with pytest.raises(ValueError, match="prompt"):
            bench.admit(prompt=prompt)
    bench.sequences.clear()
    with pytest.raises(ValueError, match="max_tokens"):
        bench.admit(output=0)
    bench.sequences.clear()
    bench.admit()
    with pytest.raises(ValueError, match="already"):
        bench.scheduler.admit(bench.sequences[1])
    with pytest.raises(ValueError, match="fit"):
        Scheduler(dataclasses.replace(bench.limits, max_context=33), PagePool(2))


def test_a_failed_step_ends_its_own_rows_only() -> None:
    bench = Bench(sequences=1)
    first, second = bench.admit(), bench.admit()
    plan = bench.scheduler.plan(bench.now)
    assert plan is not None
    bench.take(bench.scheduler.fail(plan))
    assert bench.events[first] == [Event(first, failure=Failure.STEP)]
    assert bench.scheduler.fail(plan) == []
    bench.run()
    assert bench.output(second) == alone(bench.sequences[second].request, 32)


def test_a_sick_row_fails_alone() -> None:
    bench = Bench()
    first, second = bench.admit(), bench.admit()
    plan = bench.scheduler.plan(bench.now)
    assert plan is not None
    result = bench.runner.run(plan)
    bench.take(bench.scheduler.commit(plan, StepResult({**result.rows, first: RowResult(())}), bench.now))
    assert bench.events[first] == [Event(first, failure=Failure.STEP)]
    bench.run()
    assert bench.output(second) == alone(bench.sequences[second].request, 32)


def test_a_result_for_other_rows_is_refused_whole() -> None:
    bench = Bench(batch=7)
    first, second = bench.admit(output=1), bench.admit(prompt=9)  # there is room for a part of the second prompt
    plan = bench.scheduler.plan(bench.now)
    assert plan is not None
    assert rows_of(plan) == {first: (0, 5, True), second: (0, 2, False)}
    one, two = RowResult((1,)), RowResult((2,))
    for rows in ({}, {99: one}, {first: one, 99: two}, {first: one, second: two}):
        with pytest.raises(ValueError, match="rows"):
            bench.scheduler.commit(plan, StepResult(rows), bench.now)
    with pytest.raises(ValueError, match="more than 1 ids"):
        bench.scheduler.commit(plan, StepResult({first: RowResult((1, 2))}), bench.now)
    assert bench.scheduler.live == 2
    bench.take(bench.scheduler.commit(plan, StepResult({first: one}), bench.now))
    assert bench.output(first) == [1]


def test_cancel_between_plan_and_commit_is_no_harm() -> None:
    bench = Bench()
    first, second = bench.admit(), bench.admit()
    plan = bench.scheduler.plan(bench.now)
    assert plan is not None
    result = bench.runner.run(plan)
    bench.scheduler.cancel(first)
    bench.scheduler.cancel(first)
    bench.take(bench.scheduler.commit(plan, result, bench.now))
    assert bench.events[first] == []
    bench.run()
    assert bench.output(second) == alone(bench.sequences[second].request, 32)


def test_who_has_no_row_is_admitted_by_the_plan_that_gives_it_one() -> None:
    bench = Bench(batch=5)
    bench.admit(prompt=5)
    second = bench.admit(prompt=5)
    plan = bench.scheduler.plan(bench.now)
    assert plan is not None
    assert [row.key for row in plan.rows] == [1]
    slot = bench.sequences[second].slot
    assert [admitted.key for admitted in plan.admitted] == [1]
    bench.take(bench.scheduler.fail(plan))
    again = bench.scheduler.plan(bench.now)
    assert again is not None
    assert [(admitted.key, admitted.slot) for admitted in again.admitted] == [(second, slot)]
    assert [released.key for released in again.released] == [1]
    assert [row.first_page for row in again.rows] == [0]
    bench.take(bench.scheduler.commit(again, bench.runner.run(again), bench.now))
    following = bench.scheduler.plan(bench.now)
    assert following is not None
    assert (following.admitted, following.released) == ((), ())


@pytest.mark.parametrize(("expires", "failure"), [(1.0, Failure.DEADLINE), (None, Failure.DEADLINE), (0.5, None)])
def test_the_moment_itself_is_too_late(expires: float | None, failure: Failure | None) -> None:
    bench = Bench()
    begun = bench.now
    key = bench.admit(output=900, deadline=begun + 1.0, expires_at=None if expires is None else begun + expires)
    bench.step(0.25)
    assert not bench.ended(key)
    bench.now = begun
    bench.step(expires or 1.0)
    assert bench.ended(key)
    assert bench.events[key][-1].failure is failure
