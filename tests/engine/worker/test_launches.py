"""What the first rank's pipelines tell a device reaches those of the other ranks as it was, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as some

from engine.api import GREEDY, Constraint, Stopping
from engine.execution.batch_pipeline import BatchRow, Changes
from engine.execution.pipeline import Half, MorePages, Pipeline, Rewrite, RowState, StepLaunch, in_flight, run_share
from engine.execution.router import AHEAD, ALL_OPTIONS, Capacity, Executors, Role, StepOptions
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Admitted, Row, RowResult, Share, StepPlan, StepResult
from engine.scheduling.sequence_state import SequenceTable
from engine.settings import PAGE_SIZE
from engine.worker.launches import FollowedSteps, LedSteps, Update, tokens_of
from engine.worker.messages import BeginStep, Mirrored, Order
from tests.engine.execution.slow_device import Life, SlowDevice, SlowRunner
from tests.properties import example_count


class Noted:
    """A device of either kind that notes what it gets."""

    def __init__(self) -> None:
        self.came: list[object] = []

    def update(self, update: Update) -> None:
        self.came.append(update)

    def launch(self, launch: StepLaunch) -> None:
        self.came.append(launch)

    def poll(self, index: int, number: int) -> int | None:
        return 5

    def wait(self) -> None:
        raise AssertionError("all is there")


class Sends:
    """Orders of the first rank travel to the other one as bytes."""

    follower: FollowedSteps

    @contextmanager
    def mirrored(self, order: Mirrored) -> Iterator[None]:
        self.send(order)
        yield

    def send(self, order: Mirrored) -> None:
        read: Mirrored = msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=Order)
        self.follower.obey(read)


class Pair(Sends):
    """Two ranks."""

    def __init__(self, devices: int = 1) -> None:
        self.sequences, self.theirs = SequenceTable(), SequenceTable()
        self.own, self.followed = [Noted() for _ in range(devices)], [Noted() for _ in range(devices)]
        self.follower = FollowedSteps(self.theirs, self.followed, None)
        self.led = [LedSteps(number, one, self.mirrored) for number, one in enumerate(self.own)]

    def plan(self, plan: StepPlan) -> None:
        self.sequences.apply(plan)
        self.send(BeginStep(plan))

    def append(self, rows: tuple[Row, ...], results: dict[int, RowResult]) -> None:
        self.sequences.append(rows, results)
        self.send(tokens_of(rows, results))


def admitted(key: int, slot: int, tokens: tuple[int, ...], constraint: Constraint | None = None) -> Admitted:
    stopping = Stopping(max_tokens=40, stop_token_ids=(9,))
    return Admitted(key, slot, tokens, len(tokens), GREEDY, stopping, constraint=constraint)


def row(key: int, slot: int, start: int, count: int = 1, pages: tuple[int, ...] = ()) -> Row:
    return Row(key, slot, start, count, True, 0, pages)


def same_row(one: RowState, other: RowState) -> bool:
    plain = [(r.token, r.position, r.last_position, r.stops, r.temperature, r.noise_key, r.pages) for r in (one, other)]
    more = [(r.unreported, r.most_drafts, r.sequence.key, r.sequence.token_ids) for r in (one, other)]
    return plain[0] == plain[1] and more[0] == more[1]


def test_rows_that_are_rewritten_are_those_of_the_first_rank() -> None:
    pair = Pair(devices=2)
    constraint = Constraint('start: "a"')
    first = row(4, 1, 0, 3, (7, 8))
    pair.plan(StepPlan((first,), admitted=(admitted(4, 1, (1, 2, 3), constraint),)))
    assert pair.theirs.at(1).constraint is None
    pair.append((first,), {4: RowResult((5, 6), forced=1)})
    sequence = pair.sequences.at(1)
    state = RowState.of(sequence, 5, 30, (11, 12), 2)
    pair.led[1].update(Rewrite((state,), 17))
    assert pair.followed[0].came == []
    (came,) = pair.followed[1].came
    assert isinstance(came, Rewrite)
    assert came.number == 17
    assert same_row(came.rows[0], state)
    assert came.rows[0].sequence is pair.theirs.at(1)


def test_pages_and_launches_arrive_as_they_were() -> None:
    pair = Pair()
    given: list[MorePages | StepLaunch] = [
        MorePages(1, 2, (5, 6), cut=True),
        StepLaunch(longest=99, steps=4, options=StepOptions(graphs=False)),
        StepLaunch(rows=48),
        StepLaunch(group=4, half=Half()),
        StepLaunch(half=Half({})),
        StepLaunch(half=Half({2: b"\x03\xff"})),
    ]
    for one in given:
        if isinstance(one, MorePages):
            pair.led[0].update(one)
        else:
            pair.led[0].launch(one)
    assert pair.followed[0].came == given
    assert pair.led[0].poll(0, 1) == 5


def test_changes_of_many_rows_arrive_as_they_were() -> None:
    pair = Pair()
    pair.plan(StepPlan((row(4, 1, 0, 3, (7, 8)),), admitted=(admitted(4, 1, (1, 2, 3)),)))
    entered = BatchRow(pair.sequences.at(1), 5, 2, 30, 2, 0, since=8, first=2)
    given = Changes((3,), (entered,), (MorePages(0, 1, (4,)),), ((0, 6),))
    pair.led[0].update(given)
    (came,) = pair.followed[0].came
    assert isinstance(came, Changes)
    assert (came.left, came.paged, came.moved) == (given.left, given.paged, given.moved)
    (one,) = came.entered
    assert (one.index, one.first, one.last, one.pages) == (5, 2, 30, 2)
    assert one.sequence is pair.theirs.at(1)


def test_a_pipeline_drives_both_devices() -> None:
    """Each step's rows are written and launched on the other rank as on the first."""
    pair = Pair()
    pipeline = Pipeline(pair.led[0], pair.sequences, 64)
    pair.plan(StepPlan((row(4, 1, 0, 3, (7, 8)),), admitted=(admitted(4, 1, (1, 2, 3)),)))
    pair.append((row(4, 1, 0, 3),), {4: RowResult((4,))})
    step = row(4, 1, 3)
    pair.plan(StepPlan((step,)))
    found = pipeline.step((step,))
    assert set(found[4].token_ids) == {5}
    own, theirs = pair.own[0].came, pair.followed[0].came
    assert isinstance(own[0], Rewrite)
    assert isinstance(theirs[0], Rewrite)
    assert same_row(own[0].rows[0], theirs[0].rows[0])
    assert own[1:] == theirs[1:]
    assert any(isinstance(one, StepLaunch) for one in own)


class LedRunner(Sends, SlowRunner):
    """The first rank of two, on make-believe devices; the other one's go at a pace of their own."""

    def __init__(self, seed: int, pages: int, max_context: int, pipelines: int) -> None:
        self.devices, self.followed = (
            [first, *(SlowDevice(begin + at, pages, beside=first) for at in range(1, pipelines))]
            for begin, first in ((one, SlowDevice(one, pages)) for one in (seed, seed + 100))
        )
        self.theirs = SequenceTable()
        self.follower = FollowedSteps(self.theirs, self.followed, None)
        led = [LedSteps(number, one, self.mirrored) for number, one in enumerate(self.devices)]
        table = SequenceTable()
        self.pipelines = [Pipeline(one, table, max_context) for one in led]
        executors = Executors({Role.FEW: self})
        super().__init__(self.devices[0], Capacity(few=pipelines), {Role.FEW: self.Few(self)}, table, executors)

    @dataclass
    class Few:
        runner: LedRunner

        def run(self, share: Share) -> dict[int, RowResult]:
            return run_share(self.runner.pipelines[share.pipeline], share, ALL_OPTIONS)

    def in_flight(self, rows: tuple[Row, ...]) -> dict[int, int]:
        return in_flight(self.pipelines, rows)

    def _run(self, plan: StepPlan) -> StepResult:
        self.send(BeginStep(plan))
        result = super()._run(plan)
        self.send(tokens_of(plan.rows, result.rows))
        return result

    def _prefill(self, rows: Items[Row]) -> dict[int, RowResult]:
        for one in rows:  # as eager's orders make the other rank do
            self.followed[0].prefill(one, self.theirs.of(one))
        return super()._prefill(rows)


@pytest.mark.product
@given(seed=some.integers(0, 2**32), pages=some.integers(6, 60), pipelines=some.sampled_from((1, 2)))
@examples(max_examples=example_count(20))
def test_whatever_happens_the_other_rank_computes_the_same(seed: int, pages: int, pipelines: int) -> None:
    pages *= pipelines
    limits = Limits(
        max_sequences=8 * pipelines,
        max_batch_tokens=64,
        max_context=min(150, pages * PAGE_SIZE),
        lookahead_tokens=15,
        max_tokens_per_row=2 * AHEAD,
    )
    runner = LedRunner(seed, pages, limits.max_context, pipelines)
    life = Life(seed, runner, limits)
    life.live(12 * pipelines)
    life.check()
    runner.devices[0].flush()
    runner.followed[0].flush()
    assert runner.followed[0].slots == runner.devices[0].slots
    for own, theirs in zip(runner.devices, runner.followed, strict=True):
        assert theirs.rings == own.rings
        assert theirs.launched == own.launched
