"""Whose turn it is: order, chunks, pages, pauses, one at a time or all together."""

from __future__ import annotations

import random
import sys
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import AGING, FinishReason, Priority
from engine.settings import PAGE_SIZE
from tests.engine.scheduled import Bench, alone, rows_of
from tests.properties import example_count


def test_a_lone_request_is_planned_at_once() -> None:
    bench = Bench()
    key = bench.admit(prompt=5, output=3)
    assert rows_of(bench.step()) == {key: (0, 5, True)}
    assert rows_of(bench.step()) == {key: (5, 1, True)}
    assert rows_of(bench.step()) == {key: (6, 1, True)}
    assert bench.step() is None
    assert bench.reason(key) is FinishReason.LENGTH
    assert len(bench.output(key)) == 3
    assert bench.scheduler.load.used_pages == 0
    assert bench.scheduler.live == 0


def test_the_account_adds_up() -> None:
    bench = Bench()
    key = bench.admit(output=5, arrived_at=bench.now - 2.0)
    bench.run()
    finish = bench.events[key][-1].finish
    assert finish is not None
    assert finish.queue == pytest.approx(2.01)
    assert finish.prefill == pytest.approx(0.0)
    assert finish.decode == pytest.approx(0.04)
    assert finish.cached_tokens == 0
    start = bench.events[key][0].start
    assert start is not None
    assert (start.queue, start.prefill, start.cached_tokens) == (finish.queue, finish.prefill, 0)
    assert all(event.start is None for event in bench.events[key][1:])


def test_a_long_prompt_is_chunked_and_nobody_waits_for_it() -> None:
    bench = Bench(batch=16, pages=64)
    short = bench.admit(prompt=4, output=40)
    bench.step()
    long = bench.admit(prompt=100, output=4)
    chunks = []
    for _ in range(7):
        rows = rows_of(bench.step())
        assert rows[short][1:] == (1, True), "a decode row missed its step"
        chunks.append(rows[long])
    assert [count for _, count, _ in chunks] == [16] * 6 + [4]
    assert [sample for _, _, sample in chunks] == [False] * 6 + [True]
    bench.run()
    for key in (short, long):
        assert bench.output(key) == alone(bench.sequences[key].request, 64)


def test_prompts_share_the_budget_in_order_of_rank() -> None:
    bench = Bench(batch=20)
    first, second, third = (bench.admit(prompt=12) for _ in range(3))
    assert rows_of(bench.step()) == {first: (0, 12, True), second: (0, 8, False)}
    assert rows_of(bench.step()) == {second: (8, 4, True), third: (0, 12, True)}
    assert rows_of(bench.step()) == {first: (12, 1, True), second: (12, 1, True), third: (12, 1, True)}


def test_second_tokens_wait_two_steps_at_most_for_prompts_that_end() -> None:
    bench = Bench(batch=64, pages=64)
    keys, fed = [], []
    for _ in range(4):
        keys.append(bench.admit(prompt=12, output=8))
        fed.append(list(rows_of(bench.step())))
    assert fed == [keys[:1], keys[1:2], keys[2:3], [keys[3], *keys[:3]]]
    assert list(rows_of(bench.step())) == keys
    bench.run()
    for key, sequence in bench.sequences.items():
        assert bench.output(key) == alone(sequence.request, 64)


def test_a_second_token_waits_for_nobody_where_others_decode() -> None:
    bench = Bench(batch=64, pages=64)
    old = bench.admit(prompt=4, output=40)
    bench.step()
    bench.step()
    first = bench.admit(prompt=12)
    assert rows_of(bench.step()) == {old: (5, 1, True), first: (0, 12, True)}
    other = bench.admit(prompt=12)
    assert rows_of(bench.step()).keys() == {old, first, other}


def test_a_second_token_waits_for_no_chunk_and_for_no_prompt_of_lower_priority() -> None:
    bench = Bench(batch=16, pages=64)
    first = bench.admit(prompt=4)
    bench.step()
    long = bench.admit(prompt=20)
    assert rows_of(bench.step()) == {first: (4, 1, True), long: (0, 16, False)}
    bench.run()
    watched = bench.admit(prompt=4, priority=Priority.INTERACTIVE)
    bench.step()
    other = bench.admit(prompt=4)
    assert rows_of(bench.step()) == {watched: (4, 1, True), other: (0, 4, True)}


def test_priorities_go_first() -> None:
    bench = Bench(sequences=1)
    running = bench.admit(output=4)
    bench.step()
    keys = [bench.admit(priority=priority, output=2) for priority in (Priority.BACKGROUND, Priority.NORMAL)]
    keys.append(bench.admit(priority=Priority.INTERACTIVE, output=2))
    bench.run()
    order = sorted(keys, key=lambda key: bench.sequences[key].first_planned_at or 0.0)
    assert order == keys[::-1]
    assert bench.ended(running)


@settings(max_examples=example_count(40), deadline=None)
@given(st.integers(1, 4), st.integers(1, 12), st.randoms(use_true_random=False))
def test_background_is_overtaken_only_for_a_while(sequences: int, output: int, rng: random.Random) -> None:
    """A flood of interactive requests that alone would fill the engine for ever: who arrives more than two levels'
    worth of aging later must not be planned first."""
    bench = Bench(sequences=sequences, pages=sequences * 2)
    step = AGING / 25
    background = bench.admit(priority=Priority.BACKGROUND, output=output)
    arrival = bench.now
    while not bench.ended(background):
        assert bench.now < arrival + 2 * AGING + step * 14 * 6, "starved"
        while bench.scheduler.load.waiting < sequences + 2:
            bench.admit(priority=Priority.INTERACTIVE, output=rng.randrange(1, 12))
        bench.step(step)
    planned = bench.sequences[background].first_planned_at
    assert planned is not None
    for sequence in bench.sequences.values():
        if sequence.first_planned_at is not None and sequence.first_planned_at < planned:
            assert sequence.request.arrived_at <= arrival + 2 * AGING


def test_the_youngest_of_the_lowest_yields_its_pages_and_loses_nothing() -> None:
    bench = Bench(sequences=3, pages=8)
    old = bench.admit(prompt=30, output=60)
    bench.now += 0.5
    young = bench.admit(prompt=30, output=60)
    vip = bench.admit(prompt=10, output=60, priority=Priority.INTERACTIVE)
    requests = {key: bench.sequences[key].request for key in (old, young, vip)}
    first_victim = None
    while bench.step() is not None:
        if first_victim is None and bench.scheduler.load.preemptions:
            first_victim = next(key for key in requests if not bench.ended(key) and bench.sequences[key].slot < 0)
    assert first_victim == young
    assert bench.scheduler.load.preemptions > 0
    for key, request in requests.items():
        assert bench.output(key) == alone(request, 8)
    assert bench.scheduler.load.used_pages == 0


def test_a_paused_sequence_keeps_its_pages_until_someone_needs_them() -> None:
    bench = Bench(sequences=2, pages=8)
    slow = bench.admit(prompt=40, output=40, priority=Priority.INTERACTIVE)
    bench.step()
    bench.scheduler.pause(slow)
    assert bench.step() is None
    assert bench.sequences[slow].slot >= 0
    other = bench.admit(prompt=40, output=60, priority=Priority.BACKGROUND)
    bench.run()
    assert bench.ended(other)
    assert not bench.ended(slow)
    assert bench.sequences[slow].slot < 0, "the paused one was to yield first, whatever its priority"
    load = bench.scheduler.load
    assert (load.running, load.waiting, load.paused) == (0, 0, 1)
    bench.scheduler.resume(slow)
    bench.run()
    assert bench.output(slow) == alone(bench.sequences[slow].request, 8)


def test_nobody_starts_only_to_be_thrown_out_by_the_next_page() -> None:
    bench = Bench(sequences=3, pages=8)
    running = [bench.admit(prompt=30, output=10) for _ in range(2)]
    bench.step()
    large = bench.admit(prompt=60, output=30)  # exactly what is free, while the others are about to grow
    bench.run()
    assert bench.scheduler.load.preemptions == 0
    assert all(bench.ended(key) for key in (*running, large))


def test_steps_that_bring_several_ids_are_not_cut_at_page_borders() -> None:
    bench = Bench(ids=5)
    key = bench.admit(prompt=13, output=100)
    bench.run()
    assert [len(event.token_ids) for event in bench.events[key]] == [5] * 20


def test_paused_sequences_do_not_keep_slots_from_the_waiting() -> None:
    bench = Bench(sequences=2)
    slow = [bench.admit(output=50) for _ in range(2)]
    bench.step()
    for key in slow:
        bench.scheduler.pause(key)
        bench.scheduler.pause(key)
    other = bench.admit(output=3)
    bench.run()
    assert bench.ended(other)
    for key in slow:
        bench.scheduler.resume(key)
        bench.scheduler.resume(key)
    bench.run()
    for key in slow:
        assert bench.output(key) == alone(bench.sequences[key].request, 32)


def test_a_waiting_sequence_can_be_paused() -> None:
    bench = Bench(sequences=1)
    first, second, third = (bench.admit(output=3) for _ in range(3))
    bench.scheduler.pause(second)
    bench.run()
    assert [bench.ended(key) for key in (first, second, third)] == [True, False, True]
    bench.scheduler.resume(second)
    bench.run()
    assert bench.ended(second)


def test_batching_off_runs_one_at_a_time_with_the_same_answers() -> None:
    bench = Bench(batching=False)
    keys = [bench.admit(output=5 + index) for index in range(4)]
    bench.run()
    assert all(len(plan.rows) == 1 for plan in bench.plans)
    for key in keys:
        assert bench.output(key) == alone(bench.sequences[key].request, 32)


def test_batching_goes_off_and_on_while_sequences_run() -> None:
    bench = Bench(sequences=4)
    keys = [bench.admit(output=40) for _ in range(4)]
    for count in range(30):
        bench.scheduler.set_batching(count % 6 < 3)
        plan = bench.step()
        assert plan is not None
        assert len(plan.rows) == (4 if count % 6 < 3 else 1)
    bench.scheduler.set_batching(True)
    bench.run()
    for key in keys:
        assert bench.output(key) == alone(bench.sequences[key].request, 32)


def test_who_is_not_paused_goes_on_when_batching_goes_off() -> None:
    bench = Bench()
    paused, other = bench.admit(output=20), bench.admit(output=20)
    bench.step()
    bench.scheduler.pause(paused)
    bench.scheduler.set_batching(False)
    assert bench.sequences[other].slot >= 0
    assert bench.sequences[paused].slot < 0
    assert bench.scheduler.load.preemptions == 1
    bench.run()
    bench.scheduler.resume(paused)
    bench.run()
    for key in (paused, other):
        assert bench.output(key) == alone(bench.sequences[key].request, 32)


def test_equal_pages_of_others_are_given_up_before_anything_is_computed_again() -> None:
    """Two who computed the same at the same time hold it twice; the one that is left may need that room."""
    bench = Bench(batch=100, pages=8)
    short = bench.admit(prompt=33, output=1, text="same")
    long = bench.admit(prompt=33, output=200, text="same")
    bench.step()
    assert bench.ended(short)
    assert set(page.number for page in bench.sequences[long].prefix.pages).isdisjoint(bench.sequences[long].pages)
    bench.run()
    assert bench.scheduler.load.preemptions == 0
    assert bench.output(long) == alone(bench.sequences[long].request, 8)
    assert len(bench.output(long)) == 8 * PAGE_SIZE - 33


def lines_run(waiting: int) -> int:
    """Lines of Python that 50 steps and a few operations take with so many waiting."""
    bench = Bench(sequences=2, pages=64)
    for index in range(waiting + 2):
        bench.admit(output=900, deadline=bench.now + 1000 + index % 7)
    bench.step()
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal lines
        if not frame.f_globals["__name__"].startswith("engine."):  # what the collector finalizes meanwhile
            return None
        lines += event == "line"
        return trace

    sys.settrace(trace)
    for _ in range(50):
        bench.step()
    bench.scheduler.pause(waiting)
    bench.scheduler.resume(waiting)
    bench.scheduler.cancel(waiting)
    sys.settrace(None)
    return lines


def test_a_long_queue_costs_a_step_nothing() -> None:
    assert lines_run(10_000) == lines_run(10)
