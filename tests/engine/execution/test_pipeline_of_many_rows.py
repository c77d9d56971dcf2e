"""Many rows without a GPU: on a slow make-believe device, and beside the captured steps of few rows."""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as some
from msgspec.structs import replace

from engine.api import GenerationRequest
from engine.errors import EngineFailed
from engine.execution.batch_pipeline import BATCH_AHEAD, MOST_BATCH_AHEAD, BatchPipeline
from engine.execution.graphs.batch import Batched
from engine.execution.pipeline import Pipeline, in_flight, run_share
from engine.execution.router import ALL_OPTIONS, Capacity, Executors, Role
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Row, RowResult, Share, StepPlan
from engine.scheduling.sequence_state import SequenceState, SequenceTable
from engine.settings import PAGE_SIZE
from tests.engine.execution.slow_batches import BUCKETS, SlowBatches
from tests.engine.execution.slow_device import (
    SICK,
    Life,
    SlowDevice,
    SlowRunner,
    answer,
    request,
)
from tests.engine.stepped import holding, put
from tests.properties import example_count

LOOKAHEAD = Batched.lookahead_tokens


class Batches:
    """What decodes."""

    def __init__(self, device: SlowBatches, max_context: int) -> None:
        self.sequences = SequenceTable()
        self.pipeline = BatchPipeline(device, self.sequences, max_context, BUCKETS)

    def run(self, share: Share) -> dict[int, RowResult]:
        return self.pipeline.step(share.rows)


class BatchesLife(Life):
    def __init__(self, seed: int, pages: int, lookahead: int, sick: int, most: int = 0) -> None:
        chance = random.Random(seed)
        self.device = SlowBatches(seed, pages, sick)
        limits = Limits(
            max_sequences=most or chance.choice((1, 3, 7, 12, 14)),
            max_batch_tokens=chance.choice((5, 64, 300)),
            max_context=min(150, pages * PAGE_SIZE),
            lookahead_tokens=lookahead,
            max_tokens_per_row=MOST_BATCH_AHEAD,
        )
        self.decoding = Batches(self.device, limits.max_context)
        capacity = Capacity(many=BUCKETS[-1])
        runner = SlowRunner(self.device, capacity, {Role.MANY: self.decoding}, self.decoding.sequences)
        super().__init__(seed, runner, limits)


@pytest.mark.product
@given(
    seed=some.integers(0, 2**32),
    pages=some.integers(6, 90),
    lookahead=some.sampled_from((MOST_BATCH_AHEAD - 1, LOOKAHEAD)),
    sick=some.sampled_from((-1, SICK)),
)
@examples(max_examples=example_count(70))
def test_whatever_happens_each_answer_is_its_own(seed: int, pages: int, lookahead: int, sick: int) -> None:
    life = BatchesLife(seed, pages, lookahead, sick)
    life.live(30)
    life.check()


def test_rows_that_stay_are_told_nothing_and_the_device_is_kept_busy() -> None:
    life = BatchesLife(3, 200, LOOKAHEAD, -1, most=12)
    for key in range(6):
        life.take(request([key, 5], max_tokens=120))
    while min(map(len, life.got)) < 30:
        life.step()
    changes, steps = len(life.device.told), len(life.device.launched)
    while min(map(len, life.got)) < 100:
        life.step()
        pipeline = life.decoding.pipeline
        assert len(pipeline._in_flight) == BATCH_AHEAD
    later = life.device.told[changes:]
    assert all(not one.left and not one.entered and not one.moved for one in later)
    life.take(request([70], max_tokens=3))
    while life.step():
        pass
    life.check()
    assert sum(len(one.entered) for one in life.device.told) == 7
    assert len(life.device.launched) - steps < 100
    assert sum(len(one.moved) for one in life.device.told) <= 7


def test_rows_move_down_into_a_smaller_batch() -> None:
    life = BatchesLife(4, 200, LOOKAHEAD, -1, most=12)
    for key in range(10):
        life.take(request([key, 9], max_tokens=30 if key < 8 else 100))
    while life.step():
        pass
    life.check()
    assert life.device.launched[20] == 12
    assert life.device.launched[-1] == 2
    assert 2 <= sum(len(one.moved) for one in life.device.told) <= 8


def test_no_step_goes_beyond_the_last_token_or_the_pages() -> None:
    life = BatchesLife(5, 40, LOOKAHEAD, -1, most=2)
    life.take(request([1, 2, 3], max_tokens=60))
    while life.step():
        pass
    life.check()
    assert len(life.device.launched) == 59  # the first token was the prompt's
    life = BatchesLife(5, 40, MOST_BATCH_AHEAD - 1, -1, most=2)  # pages come at the last moment
    life.take(request([1, 2, 3], max_tokens=60))
    while life.step():
        pass
    life.check()


def test_pages_that_do_not_reach_are_an_error() -> None:
    hand = Hand(2)
    hand.step(hand.states[:1])
    hand.states[0].pages[1:] = []
    hand.pipeline = BatchPipeline(SlowBatches(1, 200), hand.table, 150, BUCKETS)
    hand.states[0].token_ids += range(20)
    with pytest.raises(EngineFailed, match="in flight"):
        hand.step(hand.states[:1])


def next_row(state: SequenceState) -> Row:
    return Row(state.key, state.slot, len(state.token_ids) - 1, 1, True)


class Hand:
    """A pipeline that is fed by hand."""

    def __init__(self, rows: int) -> None:
        self.device, self.table = SlowBatches(1, 200), SequenceTable()
        self.pipeline = BatchPipeline(self.device, self.table, 150, BUCKETS)
        self.asked = [request([key], max_tokens=140) for key in range(rows)]
        self.states = [
            put(self.table, holding(one, range(10 * key, 10 * key + 10), key)) for key, one in enumerate(self.asked)
        ]

    def step(self, states: Rows[SequenceState]) -> None:
        found = self.pipeline.step([next_row(state) for state in states])
        assert found.keys() == {state.key for state in states}
        for state in states:
            assert 1 <= len(found[state.key].token_ids) <= MOST_BATCH_AHEAD
            state.token_ids += found[state.key].token_ids

    def check(self) -> None:
        for state, asked in zip(self.states, self.asked, strict=True):
            made = state.token_ids[state.prompt_length :]
            assert made == answer(asked, 150, -1)[0][: len(made)]


def test_rows_come_and_go_in_any_order() -> None:
    hand, chance = Hand(12), random.Random(9)
    for _ in range(60):
        states = chance.sample(hand.states, chance.randrange(1, 13))
        for _ in range(chance.randrange(1, 3)):
            if max(len(state.token_ids) for state in states) < 130:
                hand.step(states)
    hand.check()


def test_a_wave_that_joins_finds_few_steps_in_front_of_it() -> None:
    hand = Hand(12)
    for rows in (4, 8, 12):
        launched = len(hand.device.launched)
        hand.step(hand.states[:rows])
        assert len(hand.device.launched) - launched <= 2
    hand.step(hand.states)
    assert len(hand.pipeline._in_flight) == BATCH_AHEAD
    hand.check()


def test_a_failure_leaves_no_row_behind() -> None:
    hand = Hand(5)
    hand.step(hand.states)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hand.device, "wait", lambda: (_ for _ in ()).throw(EngineFailed("a fault")))
        patch.setattr(hand.device, "poll", lambda number, rows: None)
        with pytest.raises(EngineFailed):
            hand.step(hand.states)
    assert 0 not in hand.pipeline._held
    for _ in range(5):
        hand.step(hand.states[2:])
    hand.step(hand.states[:1])
    hand.check()
    assert hand.device.told[-1].entered[0].sequence is hand.states[0]


def test_pages_exchanged_in_place_are_noticed() -> None:
    hand = Hand(3)
    for _ in range(20):
        hand.step(hand.states)
    hand.device.flush()
    slots, state = hand.device.slots, hand.states[1]
    slots[150], slots[10] = slots[10], [777] * PAGE_SIZE
    row = Row(1, 1, len(state.token_ids) - 1, 1, True, 0, (150, *range(11, 20)))
    hand.table.apply(StepPlan((row,)))
    for _ in range(20):
        hand.step(hand.states)
    hand.check()


class HandOver(Life):
    """A few rows are the captured steps', more are the batch's, but for one in four, whose tokens torch chooses."""

    def __init__(self, seed: int, pages: int, most: int) -> None:
        self.batches, self.few = SlowBatches(seed, pages), SlowDevice(seed, pages)
        self.few.slots, self.few.queue = self.batches.slots, self.batches.queue
        limits = Limits(
            max_sequences=most,
            max_batch_tokens=64,
            max_context=150,
            lookahead_tokens=15,
            max_tokens_per_row=16,
        )
        decoding = Batches(self.batches, 150)
        self.pipeline = Pipeline(self.few, decoding.sequences, 150)
        self.drained = 0
        capacity, computing = (
            Capacity(few=1, many=BUCKETS[-1]),
            {Role.FEW: self, Role.MANY: decoding},
        )
        runner = SlowRunner(self.batches, capacity, computing, decoding.sequences, Executors({Role.FEW: self}))
        super().__init__(seed, runner, limits)

    def take(self, asked: GenerationRequest) -> None:
        super().take(replace(asked, logprobs=0) if len(self.asked) % 4 == 1 else asked)

    def in_flight(self, rows: tuple[Row, ...]) -> dict[int, int]:
        return in_flight([self.pipeline], rows)

    def run(self, share: Share) -> dict[int, RowResult]:
        self.drained += share.drain
        return run_share(self.pipeline, share, ALL_OPTIONS)


@pytest.mark.product
@given(seed=some.integers(0, 2**32), pages=some.integers(60, 120), most=some.sampled_from((9, 11, 16)))
@examples(max_examples=example_count(60))
def test_rows_go_to_the_batch_and_back(seed: int, pages: int, most: int) -> None:
    life = HandOver(seed, pages, most)
    life.live(20)
    life.check()


def test_nothing_is_computed_twice_when_the_batch_takes_over() -> None:
    life = HandOver(2, 200, 12)
    plain = [key for key in range(11) if key % 4 != 1]
    for key in range(plain[-1] + 1):
        life.take(request([key, 6], max_tokens=100))
    for key in range(plain[-1] + 1):
        if key not in plain:
            life.scheduler.cancel(key)
            life.gone.add(key)
    while min(len(life.got[key]) for key in plain) < 20:
        life.step()
    life.take(request([90], max_tokens=40))
    while not life.drained:
        flight, made = len(life.pipeline._in_flight), [len(life.got[key]) for key in plain]
        assert flight > 2
        life.step()
    assert [len(life.got[key]) - before for key, before in zip(plain, made, strict=True)] == [flight] * 8
    assert not life.pipeline._in_flight
    while life.step():
        pass
    life.check()


def test_too_many_rows_are_refused() -> None:
    hand = Hand(13)
    with pytest.raises(EngineFailed, match="12 rows"):
        hand.step(hand.states)
    hand.step(hand.states[:12])
    hand.check()
