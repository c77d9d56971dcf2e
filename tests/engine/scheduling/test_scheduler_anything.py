"""Anything may happen to a scheduler, in any order: no page, slot or answer is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.api import FinishReason, Priority, Stopping
from engine.ipc.events import Event, Failure
from engine.scheduling.plan import RowResult, StepPlan, StepResult
from engine.scheduling.rank import rank
from engine.settings import PAGE_SIZE
from tests.engine.scheduled import Bench, alone, sent
from tests.properties import example_count

pytestmark = pytest.mark.product


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
            solo=data.draw(st.sampled_from([(0, 0), (0, 0), (0, 5), (3, 9)])),
        )

    @rule(count=st.integers(1, 5), prompt=st.integers(1, 40), priority=st.sampled_from(Priority))
    def come_while_a_step_runs(self, count: int, prompt: int, priority: Priority) -> None:
        """Those who do may have slots and pages before it ends; nobody who may be in that step loses any to them."""
        bench = self.bench

        def held() -> dict[int, tuple[int, int]]:
            mine = {key: bench.sequences[key] for key in self.live()}
            return {key: (one.slot, len(one.pages)) for key, one in mine.items() if one.slot >= 0 and not one.paused}

        def come() -> None:
            before = held()
            for _ in range(count):
                bench.admit(prompt=min(prompt, bench.limits.max_context - 1), priority=priority, text=1)
                bench.scheduler.start_early()
            assert before.items() <= held().items()
            self.pages_and_slots_are_accounted_for()

        bench.step(meanwhile=come)

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
            in_solo = {key for key in self.live() if self.bench.sequences[key].in_solo}
            plan = self.bench.step(seconds)
            self.check_order(plan, slotless)
            assert plan is None or len(plan.rows) == 1 or in_solo.isdisjoint(row.key for row in plan.rows)

    def check_order(self, plan: StepPlan | None, slotless: set[int]) -> None:
        """Whoever got a slot goes before all that still wait for one."""
        if plan is None:
            return
        started = [rank(self.bench.sequences[row.key]) for row in plan.rows if row.key in slotless]
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
            self.sick.update(row.key for row in plan.rows)

    @rule(computed=st.booleans())
    def run_out_of_memory(self, computed: bool) -> None:
        """Before the runner has done anything, or after all of it."""
        plan = self.bench.scheduler.plan(self.bench.now)
        if plan is not None:
            if computed:
                self.bench.runner.run(sent(plan))
            events = self.bench.scheduler.out_of_memory(plan)
            assert not events or (len(plan.rows) == 1 and plan.rows[0].count <= PAGE_SIZE)
            self.bench.take(events)
            self.sick.update(event.key for event in events)

    @rule(computed=st.booleans())
    def raise_in_a_step(self, computed: bool) -> None:
        """Before the runner has done anything, or after all of it."""
        plan = self.bench.scheduler.plan(self.bench.now)
        if plan is not None:
            if computed:
                self.bench.runner.run(sent(plan))
            events = self.bench.scheduler.raised(plan)
            assert not events or len(plan.rows) == 1
            self.bench.take(events)
            self.sick.update(event.key for event in events)

    @rule(data=st.data())
    def break_a_row(self, data: st.DataObject) -> None:
        bench = self.bench
        plan = bench.scheduler.plan(bench.now)
        if plan is None:
            return
        rows = dict(bench.runner.run(sent(plan)).rows)
        row = data.draw(st.sampled_from(plan.rows))
        if row.sample:
            rows[row.key] = RowResult(())
            self.sick.add(row.key)
        bench.take(bench.scheduler.commit(plan, StepResult(rows), bench.now))

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


SchedulerMachine.TestCase.settings = settings(max_examples=example_count(60), stateful_step_count=30, deadline=None)
TestScheduler = SchedulerMachine.TestCase
