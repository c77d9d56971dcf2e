"""What the first rank's pipelines tell a device reaches those of the other ranks as it was, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from engine.api import GREEDY, Constraint, Stopping
from engine.execution.batch_pipeline import BatchRow, Changes
from engine.execution.pipeline import Half, MorePages, Pipeline, Rewrite, RowState, StepLaunch
from engine.execution.router import StepOptions
from engine.scheduling.plan import Admitted, Row, RowResult, StepPlan
from engine.scheduling.sequence_state import SequenceTable
from engine.worker.group import BeginStep, Mirrored, Order
from engine.worker.launches import FollowedSteps, LedSteps, Update, tokens_of


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


class Pair:
    """Two ranks, whose orders travel as bytes."""

    def __init__(self, devices: int = 1) -> None:
        self.sequences, self.theirs = SequenceTable(), SequenceTable()
        self.own, self.followed = [Noted() for _ in range(devices)], [Noted() for _ in range(devices)]
        self.follower = FollowedSteps(self.theirs, self.followed, None)
        self.led = [LedSteps(number, one, self.mirrored) for number, one in enumerate(self.own)]

    @contextmanager
    def mirrored(self, order: Mirrored) -> Iterator[None]:
        self.send(order)
        yield

    def send(self, order: Mirrored) -> None:
        read: Mirrored = msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=Order)
        self.follower.obey(read)

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
