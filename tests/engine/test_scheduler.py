"""The scheduler with the fake runner, which refuses every plan that would compute rubbish."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections import Counter
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.api import FinishReason, GenerationRequest, Priority, Stopping
from engine.events import Event, Failure
from engine.fake import FakeRunner, plain_request
from engine.pages import PagePool
from engine.plan import RowResult, StepPlan, StepResult
from engine.prefix import PrefixIndex
from engine.rank import AGING, rank
from engine.scheduler import Limits, Scheduler
from engine.sequence import Sequence
from engine.settings import PAGE_SIZE, EngineSettings, FakeSettings


class Bench:
    """A scheduler, its pool and a fake runner, driven by hand. Time is a number that the test moves."""

    def __init__(
        self,
        *,
        sequences: int = 4,
        batch: int = 64,
        pages: int = 32,
        ids: int = 1,
        batching: bool = True,
        prefix: bool = True,
    ) -> None:
        context = pages * PAGE_SIZE
        fake = FakeSettings(max_context=context, total_pages=pages, tokens_per_step=ids)
        self.runner = FakeRunner(EngineSettings(model="", kind="fake", max_sequences=sequences, fake=fake))
        self.pool = PagePool(pages)
        limits = Limits(max_sequences=sequences, max_batch_tokens=batch, max_context=context, tokens_per_step=ids)
        self.prefixes = PrefixIndex(self.pool, enabled=prefix)
        self.scheduler = Scheduler(limits, self.pool, batching, self.prefixes)
        self.limits = limits
        self.now = 1000.0
        self.sequences: dict[int, Sequence] = {}
        self.events: dict[int, list[Event]] = {}
        self.plans: list[StepPlan] = []

    def admit(self, prompt: int = 5, output: int = 8, text: object = None, **changes: object) -> int:
        """Prompts with the same `text` begin alike."""
        key = len(self.sequences) + 1
        rng = random.Random(key if text is None else str(text))
        ids = tuple(rng.randrange(1, 256) for _ in range(prompt))
        request = dataclasses.replace(plain_request(ids, output, arrived_at=self.now), **changes)  # type: ignore[arg-type]
        self.sequences[key] = Sequence(request, list(request.token_ids), key=key)
        self.scheduler.admit(self.sequences[key])
        self.events[key] = []
        return key

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert not self.ended(event.key), "something came after the end"
            self.events[event.key].append(event)

    def step(self, seconds: float = 0.01) -> StepPlan | None:
        self.now += seconds
        self.take(self.scheduler.expire(self.now))
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self.plans.append(plan)
            self.take(self.scheduler.commit(plan, self.runner.run(plan), self.now))
        return plan

    def run(self, most: int = 10_000) -> int:
        """Steps until nothing is left to do; how many it took."""
        for count in range(most):
            if self.step() is None:
                return count
        raise AssertionError(f"not done after {most} steps")

    def ended(self, key: int) -> bool:
        return any(event.finish is not None or event.failure is not None for event in self.events[key])

    def output(self, key: int) -> list[int]:
        return [token_id for event in self.events[key] for token_id in event.token_ids]

    def reason(self, key: int) -> FinishReason | None:
        finish = self.events[key][-1].finish
        return None if finish is None else finish.reason


def alone(request: GenerationRequest, pages: int) -> list[int]:
    """What the request brings with the engine to itself and all the time: the oracle for everything below."""
    bench = Bench(pages=pages, batch=100_000, prefix=False)
    request = dataclasses.replace(request, deadline=None, expires_at=None)
    sequence = Sequence(request, list(request.token_ids), key=1)
    bench.sequences[1], bench.events[1] = sequence, []
    bench.scheduler.admit(sequence)
    bench.now = request.arrived_at
    bench.run()
    return bench.output(1)


def rows_of(plan: StepPlan | None) -> dict[int, tuple[int, int, bool]]:
    assert plan is not None
    return {row.sequence.key: (row.start, row.count, row.sample) for row in plan.rows}


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
    assert rows_of(bench.step()) == {first: (12, 1, True), second: (8, 4, True), third: (0, 12, True)}


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


@settings(max_examples=40, deadline=None)
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


@pytest.mark.parametrize("sick", [None, RowResult(())])
def test_a_sick_row_fails_alone(sick: RowResult | None) -> None:
    bench = Bench()
    first, second = bench.admit(), bench.admit()
    plan = bench.scheduler.plan(bench.now)
    assert plan is not None
    result = bench.runner.run(plan)
    bench.take(bench.scheduler.commit(plan, StepResult((sick, result.rows[1])), bench.now))
    assert bench.events[first] == [Event(first, failure=Failure.STEP)]
    bench.run()
    assert bench.output(second) == alone(bench.sequences[second].request, 32)


def test_a_result_of_another_length_is_refused_whole() -> None:
    bench = Bench()
    bench.admit(output=1)
    plan = bench.scheduler.plan(bench.now)
    assert plan is not None
    with pytest.raises(ValueError, match="rows"):
        bench.scheduler.commit(plan, StepResult((RowResult((1,)), RowResult((2,)))), bench.now)
    assert bench.scheduler.live == 1


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


def lines_run(waiting: int) -> int:
    """Lines of Python that 50 steps and a few operations take with so many waiting."""
    bench = Bench(sequences=2, pages=64)
    for index in range(waiting + 2):
        bench.admit(output=900, deadline=bench.now + 1000 + index % 7)
    bench.step()
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal lines
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


class SchedulerMachine(RuleBasedStateMachine):
    """Anything may happen between steps. The fake runner refuses what would be computed wrongly; the rest is here."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.cancelled: set[int] = set()
        self.sick: set[int] = set()

    @initialize(
        sequences=st.integers(1, 5),
        batch=st.sampled_from([1, 7, 16, 50]),
        pages=st.integers(2, 12),
        ids=st.sampled_from([1, 1, 4]),
        batching=st.booleans(),
        prefix=st.sampled_from([True, True, False]),
    )
    def start(self, sequences: int, batch: int, pages: int, ids: int, batching: bool, prefix: bool) -> None:
        self.bench = Bench(sequences=sequences, batch=batch, pages=pages, ids=ids, batching=batching, prefix=prefix)

    def live(self) -> list[int]:
        return [key for key in self.bench.sequences if key not in self.cancelled and not self.bench.ended(key)]

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        bench = self.bench
        maybe = st.none() | st.floats(0.0, 3.0).map(lambda seconds: bench.now + seconds)
        stops = data.draw(st.sampled_from([(), (40,), tuple(range(32, 80))]))
        bench.admit(
            prompt=data.draw(st.integers(1, bench.limits.max_context - 1)),
            priority=data.draw(st.sampled_from(Priority)),
            stopping=Stopping(
                max_tokens=data.draw(st.integers(1, 90)), min_tokens=data.draw(st.integers(0, 9)), stop_token_ids=stops
            ),
            deadline=data.draw(maybe),
            expires_at=data.draw(maybe),
            text=data.draw(st.sampled_from([None, 1, 1, 2])),
            prefix_root=data.draw(st.sampled_from([b"", b"", b"other"])),
            bypass_prefix=data.draw(st.integers(0, 9)) == 0,
        )

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """The next turn of a conversation: what was asked and answered, and a little more."""
        bench = self.bench
        ended = [one for key, one in bench.sequences.items() if bench.ended(key)]
        if not ended:
            return
        before = data.draw(st.sampled_from(ended))
        ids = (*before.token_ids, 1, 2, 3)[: bench.limits.max_context - 1]
        bench.admit(token_ids=ids, output=data.draw(st.integers(1, 40)), prefix_root=before.request.prefix_root)

    @rule(enabled=st.booleans())
    def set_prefix_cache(self, enabled: bool) -> None:
        self.bench.scheduler.set_prefix_cache(enabled)

    @rule(seconds=st.sampled_from([0.0, 0.01, 1.0]), count=st.integers(1, 12))
    def step(self, seconds: float, count: int) -> None:
        for _ in range(count):
            slotless = {key for key in self.live() if self.bench.sequences[key].slot < 0}
            plan = self.bench.step(seconds)
            self.check_order(plan, slotless)

    def check_order(self, plan: StepPlan | None, slotless: set[int]) -> None:
        """Whoever got a slot goes before all that still wait for one."""
        if plan is None:
            return
        started = [rank(row.sequence) for row in plan.rows if row.sequence.key in slotless]
        live = [self.bench.sequences[key] for key in self.live()]
        waiting = [rank(one) for one in live if one.slot < 0 and not one.paused and one.key in slotless]
        assert not started or not waiting or max(started) < min(waiting)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.live()))
        self.bench.scheduler.cancel(key)
        self.cancelled.add(key)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), resume=st.booleans())
    def pause_or_resume(self, data: st.DataObject, resume: bool) -> None:
        key = data.draw(st.sampled_from(self.live()))
        (self.bench.scheduler.resume if resume else self.bench.scheduler.pause)(key)

    @rule(key=st.integers(1, 99))
    def address_anyone(self, key: int) -> None:
        """Messages cross: the front may speak of what has ended, or never was."""
        if key not in self.live():
            self.bench.scheduler.pause(key)
            self.bench.scheduler.resume(key)
            self.bench.scheduler.cancel(key)

    @rule(enabled=st.booleans())
    def set_batching(self, enabled: bool) -> None:
        self.bench.scheduler.set_batching(enabled)

    @rule()
    def break_a_step(self) -> None:
        plan = self.bench.scheduler.plan(self.bench.now)
        if plan is not None:
            self.bench.take(self.bench.scheduler.fail(plan))
            self.sick.update(row.sequence.key for row in plan.rows)

    @rule(data=st.data())
    def break_a_row(self, data: st.DataObject) -> None:
        bench = self.bench
        plan = bench.scheduler.plan(bench.now)
        if plan is None:
            return
        rows = list(bench.runner.run(plan).rows)
        index = data.draw(st.integers(0, len(rows) - 1))
        if plan.rows[index].sample:
            rows[index] = RowResult(())
            self.sick.add(plan.rows[index].sequence.key)
        bench.take(bench.scheduler.commit(plan, StepResult(tuple(rows)), bench.now))

    @invariant()
    def pages_and_slots_are_accounted_for(self) -> None:
        bench = self.bench
        everyone = bench.sequences.values()
        expected: Counter[int] = Counter()
        users: dict[int, int] = {}
        for sequence in everyone:
            expected.update(sequence.pages)
            assert len(set(sequence.pages)) == len(sequence.pages)
            for place, page in enumerate(sequence.prefix.pages):
                users[page.number] = page.users
                assert page.users >= 1
                assert page.hash == sequence.prefix.hashes[place]
        chains = Counter(page.number for one in everyone for page in one.prefix.pages)
        assert chains == users, "a page has other users than it knows of"
        needed = set(expected) | set(chains)
        assert len(needed) == bench.prefixes.used == bench.scheduler.load.used_pages
        assert bench.prefixes.room == bench.pool.total - len(needed)
        assert bench.prefixes.kept == bench.prefixes.room - bench.pool.free
        for page, count in expected.items():
            assert bench.pool.holders(page) == count + (page in chains)
        writable = [page for one in everyone for page in one.pages[one.computed // PAGE_SIZE :]]
        assert len(set(writable)) == len(writable)
        assert all(bench.pool.holders(page) == 1 for page in writable), "a page that is shared would be written to"
        slots = [sequence.slot for sequence in everyone if sequence.slot >= 0]
        assert len(slots) == len(set(slots))
        assert all(slot < bench.limits.max_sequences for slot in slots)
        live = set(self.live())
        for key, sequence in bench.sequences.items():
            assert sequence.computed <= min(len(sequence.token_ids), len(sequence.pages) * PAGE_SIZE)
            assert sequence.slot < 0 or (key in live and sequence.pages)
            assert sequence.slot >= 0 or not sequence.pages

    @invariant()
    def the_load_is_true(self) -> None:
        load, live = self.bench.scheduler.load, [self.bench.sequences[key] for key in self.live()]
        assert self.bench.scheduler.live == len(live)
        assert load.paused == sum(sequence.paused for sequence in live)
        assert load.running == sum(sequence.slot >= 0 and not sequence.paused for sequence in live)
        assert load.waiting == len(live) - load.paused - load.running

    def teardown(self) -> None:
        bench = self.bench
        for key in self.live():
            bench.scheduler.resume(key)
        bench.run()
        assert self.live() == []
        assert bench.scheduler.load.used_pages == 0
        for key, sequence in bench.sequences.items():
            ends = sum(event.finish is not None or event.failure is not None for event in bench.events[key])
            assert ends == (key not in self.cancelled)
            brought = bench.output(key)
            expected = alone(sequence.request, bench.limits.max_context // PAGE_SIZE)
            assert brought == expected[: len(brought)]
            last = bench.events[key][-1] if bench.events[key] else Event(key)
            if last.finish is not None and last.finish.reason is not FinishReason.TIME_BUDGET:
                assert brought == expected
            assert (last.failure is Failure.STEP) <= (key in self.sick)


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestScheduler = SchedulerMachine.TestCase
