"""Run-ahead without a GPU: on a slow make-believe device, whose tokens depend on every slot that a row reads."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Rows

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as some
from msgspec.structs import replace

from engine.api import GREEDY, GenerationRequest
from engine.errors import EngineFailed
from engine.execution.needs import Needs, chosen_by_kernels
from engine.execution.pipeline import LOW, Lookahead, Pipeline, bucket, in_flight, plain_lookahead, run_share
from engine.execution.router import (
    AHEAD,
    AHEAD_IN_TURN,
    ALL_OPTIONS,
    Capacity,
    Executors,
    Role,
    StepRows,
    route,
)
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Row, RowResult, Share, StepPlan
from engine.scheduling.sequence_state import SequenceState, SequenceTable
from engine.settings import PAGE_SIZE
from tests.engine.execution.slow_device import SICK, Life, SlowDevice, SlowRunner, answer, request
from tests.engine.stepped import holding, put
from tests.properties import example_count


class Pipelines:
    """Decodes on one pipeline, or on two in turns."""

    def __init__(self, devices: Rows[SlowDevice], max_context: int) -> None:
        self.devices, self.sequences = devices, SequenceTable()
        self.pipelines = [Pipeline(device, self.sequences, max_context) for device in devices]
        self.pipeline = self.pipelines[0]
        self.runner = SlowRunner(
            devices[0],
            Capacity(few=len(devices)),
            {Role.FEW: self},
            self.sequences,
            Executors({Role.FEW: self}),
        )

    def in_flight(self, rows: tuple[Row, ...]) -> dict[int, int]:
        return in_flight(self.pipelines, rows)

    def step(self, rows: Rows[Row]) -> dict[int, RowResult]:
        """Computes rows of sequences that the table holds, as the router shares them out."""
        step = StepRows.of(tuple(rows), {row.key: Needs.KERNELS for row in rows})
        holders = {key: (Role.FEW, at) for key, at in self.in_flight(step.decoding).items()}
        found: dict[int, RowResult] = {}
        for share in route(step, {}, holders, Capacity(few=len(self.pipelines))).shares:
            found |= self.run(share)
        return found

    def run(self, share: Share) -> dict[int, RowResult]:
        return run_share(self.pipelines[share.pipeline], share, ALL_OPTIONS)


class PipelinesLife(Life):
    """On so many pipelines."""

    def __init__(self, seed: int, pages: int, lookahead: int, sick: int, pipelines: int = 1) -> None:
        chance = random.Random(seed)
        self.device = SlowDevice(seed, pages, sick)
        others = [SlowDevice(seed + at, pages, sick, self.device) for at in range(1, pipelines)]
        limits = Limits(
            max_sequences=chance.choice((1, 3, 8, 10) if pipelines == 1 else (9, 12, 16, 20)),
            max_batch_tokens=chance.choice((5, 64)),
            max_context=min(150, pages * PAGE_SIZE),
            lookahead_tokens=lookahead,
            max_tokens_per_row=2 * AHEAD,
        )
        self.decoding = Pipelines([self.device, *others], limits.max_context)
        super().__init__(seed, self.decoding.runner, limits)


@pytest.mark.product
@given(
    seed=some.integers(0, 2**32),
    pages=some.integers(6, 60),
    ahead=some.sampled_from((0, 3, 15)),
    sick=some.sampled_from((-1, SICK)),
    pipelines=some.sampled_from((1, 2)),
)
@examples(max_examples=example_count(90))
def test_whatever_happens_each_answer_is_its_own(seed: int, pages: int, ahead: int, sick: int, pipelines: int) -> None:
    life = PipelinesLife(seed, pages * pipelines, ahead, sick, pipelines)
    life.live(12 * pipelines)
    life.check()


def alone(prompt: Rows[int], pages: int = 40, lookahead: int = 2 * AHEAD - 1, **stopping: object) -> PipelinesLife:
    life = PipelinesLife(1, pages, lookahead, -1)
    life.take(request(prompt, **stopping))
    return life


def test_a_lone_row_is_written_once_and_the_device_kept_busy() -> None:
    life = alone([5, 6, 7], max_tokens=120)
    life.step()
    idle = 0
    while len(life.got[0]) < 100:
        life.step()
        pipeline = life.decoding.pipeline
        idle += not pipeline._in_flight
        assert len(pipeline._in_flight) <= AHEAD
    while life.step():
        pass
    life.check()
    assert life.device.written == 1
    assert idle == 0
    assert life.device.launched == 119  # no step beyond the last, none twice; the first token was the prompt's
    assert life.device.sizes.count(4) > 20


def test_long_steps_are_launched_less_far_ahead() -> None:
    assert [plain_lookahead(seconds).launches for seconds in (1e-4, 5e-4, 1e-3, 1.9e-3, 3e-2)] == [
        AHEAD,
        AHEAD,
        4,
        3,
        LOW,
    ]
    life = alone([5, 6, 7], max_tokens=120)
    pipeline = life.decoding.pipeline
    pipeline.lookahead = {1: Lookahead(3, 2)}
    life.step()
    while life.step():
        assert (len(pipeline._in_flight) > 0) == (len(life.got[0]) < 120)
        assert len(pipeline._in_flight) <= 3
    life.check()
    assert life.device.launched == 119


def test_in_front_of_a_prompt_that_ends_nothing_further_is_launched() -> None:
    life = alone([5, 6, 7], max_tokens=100)
    for _ in range(6):
        life.step()
    pipeline = life.decoding.pipeline
    launched, under_way = life.device.launched, len(pipeline._in_flight)
    assert under_way > 0
    life.take(request([8, 9], max_tokens=100))
    life.step()
    assert life.device.launched == launched
    for _ in range(2 * AHEAD):  # both are moved on, as far ahead as ever
        life.step()
    assert len(pipeline._in_flight) > LOW
    while life.step():
        pass
    life.check()


def test_a_row_that_nothing_is_under_way_for_has_its_token_before_a_prompt_ends() -> None:
    life = alone([5, 6, 7], max_tokens=100)
    life.step()  # the prompt's own token
    life.step()
    pipeline = life.decoding.pipeline
    for _ in range(6):  # prompts; what was under way is soon read
        life.take(request([8, 9], max_tokens=1))
        launched, had = life.device.launched, len(life.got[0])
        life.step()
        assert len(life.got[0]) > had
    assert (life.device.launched, len(pipeline._in_flight)) == (launched + 1, 0)


def test_a_stop_ends_the_row_on_the_device() -> None:
    ids, _ = answer(request([9, 9]), 150, -1)
    life = alone([9, 9], max_tokens=100, stop_token_ids=(ids[20],))
    while life.step():
        pass
    life.device.flush()
    assert life.got[0] == ids[: ids.index(ids[20]) + 1]
    assert all(own.position == -1 for rows in life.device.buckets.values() for own in rows)


def next_row(state: SequenceState) -> Row:
    return Row(state.key, state.slot, len(state.token_ids) - 1, 1, True)


def moved_on(step: Callable[[list[Row]], dict[int, RowResult]], states: Rows[SequenceState]) -> None:
    """One step of these sequences."""
    found = step([next_row(state) for state in states])
    assert found.keys() == {state.key for state in states}
    for state in states:
        assert found[state.key].token_ids
        state.token_ids += found[state.key].token_ids


def is_right(state: SequenceState, asked: GenerationRequest) -> bool:
    made = state.token_ids[state.prompt_length :]
    return made == answer(asked, 150, -1)[0][: len(made)]


class Lone:
    """A pipeline on a device, and one sequence that has it alone."""

    def __init__(self, seed: int, prompt: Rows[int], device_pages: int, pages: int) -> None:
        self.device, self.table = SlowDevice(seed, device_pages), SequenceTable()
        self.pipeline = Pipeline(self.device, self.table, 150)
        self.asked = request(prompt, max_tokens=100)
        self.state = put(self.table, holding(self.asked, range(pages)))

    def prefill(self, start: int, count: int, sample: bool = True) -> None:
        found = self.device.prefill(Row(0, 0, start, count, sample), self.state)
        assert len(found.token_ids) == sample
        self.state.token_ids += found.token_ids

    def step(self, at_least: int) -> None:
        goal = len(self.state.token_ids) + at_least
        while len(self.state.token_ids) < goal:
            moved_on(self.pipeline.step, [self.state])

    def admit_again(self) -> None:
        one = holding(self.asked, self.state.pages)
        one.token_ids = self.state.token_ids
        self.state = put(self.table, one)


def test_pages_that_others_took_meanwhile_are_not_believed() -> None:
    """Preempted under way, its pages used by another, then given back the same: nothing old may be delivered."""
    lone = Lone(3, range(20), 12, 4)
    lone.prefill(0, 20)
    for _ in range(3):
        moved_on(lone.pipeline.step, [lone.state])
    lone.device.flush()
    for page in range(4):
        lone.device.slots[page] = [777] * PAGE_SIZE
    lone.admit_again()
    lone.prefill(0, len(lone.state.token_ids) - 1, sample=False)
    while len(lone.state.token_ids) < 60:
        moved_on(lone.pipeline.step, [lone.state])
    assert is_right(lone.state, lone.asked)


def test_numbers_begin_anew_before_they_overflow() -> None:
    life = alone([1, 2], max_tokens=100)
    pipeline = life.decoding.pipeline
    life.step()
    life.step()
    pipeline._number = (1 << 30) - 2
    pipeline.leave()
    while life.step():
        if life.device.written < 6:
            pipeline.leave()
    life.check()
    assert pipeline._number < 200


def test_a_device_that_ends_without_a_token_is_a_failure() -> None:
    life = alone([1, 2], max_tokens=100)
    life.runner.checked = False  # the failed step is planned again, which no scheduler does
    life.step()
    life.device.launch = lambda launch: None  # type: ignore[method-assign]
    with pytest.raises(EngineFailed):
        life.step()
    del life.device.launch
    while life.step():
        pass
    life.check()


def test_stops_and_logprobs_that_the_kernels_do_not_know() -> None:
    def able(asked: GenerationRequest) -> bool:
        return chosen_by_kernels(put(SequenceTable(), holding(asked, [0])))

    assert able(request([1], stop_token_ids=tuple(range(8))))
    assert not able(request([1], stop_token_ids=tuple(range(9))))
    assert not able(replace(request([1]), logprobs=0))
    assert able(request([1], stop_token_ids=(3,), min_tokens=4))
    assert able(replace(request([1]), sampling=replace(GREEDY, temperature=0.7, top_p=0.5, logit_bias=((1, 2.0),))))


def test_a_row_that_another_executor_moved_on_is_written_anew() -> None:
    lone = Lone(5, [4], 12, 8)
    for between in (1, 3, AHEAD, AHEAD + 5):
        lone.step(9)
        for _ in range(between):
            lone.prefill(len(lone.state.token_ids) - 1, 1)
    lone.step(9)
    assert is_right(lone.state, lone.asked)
    assert lone.device.written == 5


def test_pages_exchanged_in_place_are_noticed() -> None:
    lone = Lone(6, [4], 24, 8)
    lone.step(20)
    lone.device.flush()
    lone.device.slots[20], lone.device.slots[0] = lone.device.slots[0], [777] * PAGE_SIZE
    lone.table.apply(StepPlan((Row(0, 0, len(lone.state.token_ids) - 1, 1, True, 0, (20, *range(1, 8))),)))
    lone.step(20)
    assert is_right(lone.state, lone.asked)


def test_more_pages_are_no_reason_to_write_a_row_anew() -> None:
    lone = Lone(6, [4], 24, 2)
    lone.step(20)
    lone.table.apply(StepPlan((Row(0, 0, len(lone.state.token_ids) - 1, 1, True, 2, (9, 5, 7)),)))
    lone.step(40)
    assert is_right(lone.state, lone.asked)
    assert lone.device.written == 1


def many(table: SequenceTable, count: int) -> tuple[list[SequenceState], list[GenerationRequest]]:
    asked = [request([key], max_tokens=140) for key in range(count)]
    return [put(table, holding(one, range(10 * key, 10 * key + 10), key)) for key, one in enumerate(asked)], asked


def test_two_pipelines_share_what_one_cannot_hold() -> None:
    device = SlowDevice(8, 160)
    runner = Pipelines([device, SlowDevice(9, 160, beside=device)], 150)
    states, asked = many(runner.sequences, 16)
    cases = ((8, (8, None)), (9, (8, 1)), (16, (8, 8)), (16, (8, 8)), (12, None), (9, None), (3, (4, None)))
    for rows, buckets in cases:
        for _ in range(3):
            moved_on(runner.step, states[:rows])
        for at, (pipeline, own) in enumerate(zip(runner.pipelines, runner.devices, strict=True)):
            assert len(pipeline._in_flight) <= (AHEAD if rows <= 8 else AHEAD_IN_TURN)
            if buckets is not None:
                held = pipeline.in_flight([next_row(state) for state in states[:rows]])
                assert (own.here if held else None) == buckets[at]
        written = [own.written for own in runner.devices]
        moved_on(runner.step, states[:rows])
        assert [own.written for own in runner.devices] == written  # rows that go on stay where they are
    assert all(map(is_right, states, asked))


def test_one_pipeline_that_fails_leaves_the_other_sound() -> None:
    device = SlowDevice(10, 160)
    runner = Pipelines([device, SlowDevice(11, 160, beside=device)], 150)
    states, asked = many(runner.sequences, 10)

    def several(times: int) -> None:
        for _ in range(times):
            moved_on(runner.step, states)

    several(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.devices[1], "launch", lambda launch: None)
        with pytest.raises(EngineFailed):
            several(4)
    several(5)
    assert all(map(is_right, states, asked))


def test_fewer_rows_take_a_smaller_bucket() -> None:
    device, table = SlowDevice(7, 80), SequenceTable()
    pipeline = Pipeline(device, table, 150)
    states, asked = many(table, 8)
    for rows in (8, 5, 4, 3, 2, 1, 6):
        for _ in range(2):
            moved_on(pipeline.step, states[:rows])
        assert device.here == bucket(rows)
    assert all(map(is_right, states, asked))
