"""Rounds launched ahead, without a GPU: on a slow make-believe device that proposes by itself, beside the plain steps
that a row comes from and goes back to."""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as some

from bench.driven import GREEDY
from engine.api import Stopping
from engine.errors import EngineFailed
from engine.execution.graph_decode.alternating import AlternatingPipelines
from engine.execution.graph_decode.pipeline import AHEAD as STEPS_AHEAD
from engine.execution.graph_decode.pipeline import DecodePipeline, RowState, can_sample
from engine.execution.speculation.captured.rounds import (
    AHEAD,
    GROUPS,
    MORE,
    MOST_AHEAD,
    PARKED,
    RoundPipeline,
    RoundTold,
    ahead_of,
)
from engine.execution.speculation.captured.single import PATIENCE, SingleRow, group_of
from engine.kernels.reference import verified
from engine.scheduling.plan import Admitted, Row, RowResult, StepPlan
from engine.scheduling.scheduler import Limits
from engine.scheduling.sequence_state import SequenceState, SequenceTable
from engine.settings import PAGE_SIZE
from tests.engine.execution.slow_device import SICK, Life, SlowDevice, SlowMemory, SlowRunner, after, answer, request

LAID, RING = GROUPS[-1], 64
MOST_CONTEXT = 150


@dataclass
class DeviceSequence:
    """A sequence in the device's own memory."""

    newest: int = -1
    held: int = 0
    last: int = 0
    most_drafts: int = 0
    stops: tuple[int, ...] = ()
    count: int = 0
    history: list[int] = field(default_factory=list)
    pages: dict[int, int] = field(default_factory=dict)
    laid: list[int] = field(default_factory=list)  # the newest token and its draft


class SlowRounds(SlowMemory):
    """A `RoundDevice` that does what it was told when it feels like it. Its drafts are right as often as `chance`."""

    def __init__(self, seed: int, beside: SlowMemory, sick: int, chance: float) -> None:
        super().__init__(seed, len(beside.slots), sick, beside)
        self.own, self.chance, self.silence = DeviceSequence(), chance, 0.1
        self.ring: dict[int, tuple[int, int]] = {}
        self.written = self.launched = self.parked = 0
        self.most_under_way = 0

    def write(self, row: RowState, most_drafts: int, number: int) -> None:
        self.written += 1
        ids = [*row.sequence.token_ids, *row.unreported]
        assert (row.position, row.token) == (len(ids) - 1, ids[-1])
        pages = dict(enumerate(row.pages))
        fresh = DeviceSequence(
            row.position, PAGE_SIZE * len(pages), row.last_position, most_drafts, row.stops, number, ids, pages
        )
        if number == 0:
            self.flush()
            self.ring.clear()

        def write() -> None:
            self.own = fresh
            self.lay()

        self.queue.append(write)

    def add_pages(self, first: int, pages: list[int]) -> None:
        added = dict(enumerate(pages, first))

        def add() -> None:
            self.own.pages.update(added)
            self.own.held = PAGE_SIZE * len(self.own.pages)
            self.lay()

        self.queue.append(add)

    def launch(self, group: int, longest: int) -> None:
        self.launched += 1
        self.queue.append(lambda: self.round(group, longest))

    def poll(self, number: int) -> int | None:
        self.work()
        found, entry = self.ring.get((number - 1) % RING, (0, 0))
        return entry if found == number else None

    def lay(self) -> None:
        own = self.own
        if own.newest < 0:
            own.laid = []
            return
        rows = max(min(own.held, own.last) - own.newest, 0)
        known = [*own.history]
        if self.random.random() < self.silence:  # nothing comes to mind
            rows = min(rows, 1)
        for _ in range(LAID - 1):
            right = self.random.random() < self.chance
            known.append(after(known) if right else self.random.randrange(5000))
        own.laid = known[own.newest : own.newest + min(rows, 1 + own.most_drafts)]

    def slot(self, at: int) -> tuple[list[int], int]:
        return self.slots[self.own.pages[at // PAGE_SIZE]], at % PAGE_SIZE

    def read(self, tokens: int) -> list[int]:
        return [page[at] for page, at in map(self.slot, range(tokens))]

    def round(self, group: int, longest: int) -> None:
        own = self.own
        if own.newest < 0:
            return
        fed = own.laid[:group]
        if not fed:
            self.parked += 1
            self.tell(PARKED << 24)
            return self.lay()
        assert own.newest + len(fed) <= longest, "a row outgrew its launch"
        for at, token in enumerate(fed, own.newest):
            page, place = self.slot(at)
            page[place] = token
        chosen: list[int | None] = [after(self.read(own.newest + at + 1)) for at in range(len(fed))]
        chosen = [None if token is not None and token % 100 == self.sick else token for token in chosen]
        told = verified(fed, chosen, own.newest, own.last, own.stops)
        for at, (token, flags) in enumerate(told):
            closing = at + 1 == len(told)
            self.tell((len(fed) - 1 if closing else 0) << 28 | (flags if closing else MORE) << 24 | (token or 0))
            own.history += [] if token is None else [token]
        own.newest = -1 if told[-1][1] else own.newest + len(told)
        self.lay()
        return None

    def tell(self, entry: int) -> None:
        self.own.count += 1
        self.ring[(self.own.count - 1) % RING] = self.own.count, entry


class Whims:
    """Depths that change at any time."""

    def __init__(self, seed: int, depths: Rows[int]) -> None:
        self.random, self.depths = random.Random(seed), depths
        self.told_of: list[RoundTold] = []

    def most(self, sequence: SequenceState) -> int:
        return 0 if sequence.stopping.min_tokens > sequence.output_length else LAID - 1

    def depth(self, sequence: SequenceState) -> int:
        return self.random.choice(self.depths)

    def told(self, sequence: SequenceState, one: RoundTold) -> None:
        self.told_of.append(one)

    def worth(self, sequence: SequenceState, depth: int) -> bool:
        return True

    def left(self, sequence: SequenceState) -> None:
        """It comes back when it likes."""


class Steps:
    """The plain way."""

    def __init__(self, device: SlowDevice, sequences: SequenceTable) -> None:
        self.sequences = sequences
        self.alternating = AlternatingPipelines([DecodePipeline(device, sequences, MOST_CONTEXT)], sequences)

    def claims(self, rows: Rows[Row]) -> Rows[Row]:
        of = self.sequences.of
        mine = tuple(row for row in rows if row.count == 1 and row.sample and can_sample(of(row)))
        return self.alternating.claims(mine)

    def run(self, rows: Rows[Row]) -> dict[int, RowResult]:
        return self.alternating.step(rows)


class RoundsLife(Life):
    """Sequences that are fed in rounds while one decodes alone."""

    def __init__(
        self,
        seed: int,
        pages: int,
        lookahead: int,
        sick: int,
        chance: float,
        depths: Rows[int],
        most: int = 3,
        *,
        shared: bool = False,
    ) -> None:
        steps, sequences = SlowDevice(seed, pages, sick), SequenceTable()
        self.device = SlowRounds(seed, steps, sick, chance)
        self.whims = Whims(seed, depths)
        limits = Limits(
            max_sequences=random.Random(seed).choice((1, most)),
            max_batch_tokens=random.Random(seed).choice((5, 64)),
            max_context=min(MOST_CONTEXT, pages * PAGE_SIZE),
            lookahead_tokens=lookahead,
            max_tokens_per_row=max(MOST_AHEAD // 2 * LAID, 2 * STEPS_AHEAD),
        )
        self.pipeline = RoundPipeline(self.device, sequences, limits.max_context)
        self.pipeline.ahead = ahead_of(random.Random(seed).choice((1e-6, 1e-4, 1.0)))
        self.single = SingleRow(self.pipeline, sequences, self.whims, random.Random(seed).choice((0, PATIENCE)))
        runner = SlowRunner(steps, [self.single, Steps(steps, sequences)], sequences)
        super().__init__(seed, runner, limits, shared=shared)


@given(
    seed=some.integers(0, 2**32),
    pages=some.integers(6, 30),
    ahead=some.sampled_from((0, 3, 31)),
    sick=some.sampled_from((-1, SICK)),
    chance=some.sampled_from((0.0, 0.5, 0.9, 1.0)),
    depths=some.sampled_from(((7,), (3,), (0, 1, 3, 7), (2, 5))),
)
@examples(max_examples=60)
def test_whatever_happens_each_answer_is_its_own(
    seed: int, pages: int, ahead: int, sick: int, chance: float, depths: tuple[int, ...]
) -> None:
    life = RoundsLife(seed, pages, ahead, sick, chance, depths)
    life.live(5)
    life.check()


def alone(chance: float, depths: Rows[int], lookahead: int = 40, **stopping: object) -> RoundsLife:
    life = RoundsLife(1, 40, lookahead, -1, chance, depths, 1)
    life.device.silence = 0.0
    life.take(request([5, 6, 7], **stopping))
    while life.step():
        pass
    life.check()
    return life


def test_a_lone_row_is_written_once_and_rounds_bring_their_tokens() -> None:
    life = alone(1.0, (7,), max_tokens=120)
    told = life.whims.told_of
    assert life.device.written == 1
    assert life.device.parked == 0
    # The first token was the prompt's, and the last round may have had no room for a draft.
    assert sum(one.accepted + 1 for one in told) in (118, 119)
    full = [one for one in told if one.proposed == 7]
    assert len(full) > 10
    assert all(one.accepted == one.proposed for one in told)


def test_wrong_drafts_cost_rounds_and_no_token() -> None:
    told = alone(0.0, (3,), max_tokens=60).whims.told_of
    assert len(told) == 58  # the first token was the prompt's, and the last round had no room for a draft
    assert {one.accepted for one in told} == {0}


def test_another_depth_needs_no_new_row() -> None:
    life = alone(0.7, (1, 3, 7), max_tokens=120)
    assert life.device.written == 1
    assert {one.proposed for one in life.whims.told_of} >= {1, 3, 7}


def test_rounds_stay_within_pages_that_come_one_by_one() -> None:
    life = alone(1.0, (7,), lookahead=0, max_tokens=120)
    assert life.device.parked == 0  # where no room is sure, what is under way is read first


@pytest.mark.parametrize("at", range(18, 30))
def test_a_stop_inside_an_accepted_run(at: int) -> None:
    ids, _ = answer(request([5, 6, 7], max_tokens=100), MOST_CONTEXT, -1)
    life = alone(1.0, (7,), max_tokens=100, stop_token_ids=(ids[at],))
    assert life.got[0] == ids[: ids.index(ids[at]) + 1]


@pytest.mark.parametrize("most", range(1, 20))
def test_max_tokens_inside_an_accepted_run(most: int) -> None:
    assert len(alone(1.0, (7,), max_tokens=most).got[0]) == most


def test_off_delivers_what_is_under_way_and_goes_on_alike() -> None:
    life = RoundsLife(1, 40, 40, -1, 0.8, (7,), 1)
    life.take(request([5, 6, 7], max_tokens=140))
    for at in range(60):
        life.single.enabled = at % 3 != 0
        if not life.step():
            break
    while life.step():
        pass
    life.check()
    assert life.device.written > 3


def test_a_group_holds_no_longer_draft_than_asked_for() -> None:
    assert [group_of(depth) for depth in range(8)] == [1, 2, 4, 4, 8, 8, 8, 8]


@pytest.mark.parametrize(("depth", "rounds"), [(0, 8), (1, 8), (3, 8), (7, 4)])
def test_short_rounds_are_launched_further_ahead(monkeypatch: pytest.MonkeyPatch, depth: int, rounds: int) -> None:
    """So that the device has work until the host comes again; and never more than their pages may hold."""
    found = [ahead_of(seconds) for seconds in (1e-6, 100e-6, 500e-6, 1.0)]
    assert [(one.rounds, one.tokens, one.lookahead) for one in found] == [
        (8, 32, 63),
        (3, 24, 47),
        (AHEAD, 16, 15),
        (AHEAD, 16, 15),
    ]
    device, table, row = (
        SlowRounds(1, SlowMemory(1, 9), -1, 1.0),
        SequenceTable(),
        Row(0, 0, 2, 1, True, 0, (*range(9),)),
    )
    asked = Admitted(0, 0, (5, 6, 7), 3, GREEDY, Stopping(max_tokens=140))
    table.apply(StepPlan(rows=(row,), admitted=(asked,)))
    monkeypatch.setattr(device, "poll", lambda number: None)
    pipeline = RoundPipeline(device, table, MOST_CONTEXT)
    pipeline.ahead = ahead_of(1e-6)
    with pytest.raises(EngineFailed, match="nothing is under way"):
        pipeline.step(row, group_of(depth))
    assert device.launched == rounds


def test_a_device_without_an_end_is_told() -> None:
    life = RoundsLife(1, 40, 40, -1, 1.0, (7,), 1)
    life.take(request([5, 6, 7], max_tokens=140))
    life.step()
    life.step()
    life.device.queue.clear()
    life.device.ring.clear()
    with pytest.raises(EngineFailed, match="nothing is under way"):
        [life.step() for _ in range(200)]
