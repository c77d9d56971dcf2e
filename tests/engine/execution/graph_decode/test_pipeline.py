"""Run-ahead without a GPU: on a slow make-believe device, whose tokens depend on every slot that a row reads."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as some

from bench.driven import GREEDY
from engine.api import FinishReason, GenerationRequest, Stopping
from engine.errors import EngineFailed, Unsupported
from engine.execution.graph_decode.alternating import AHEAD_IN_TURN, AlternatingPipelines
from engine.execution.graph_decode.pipeline import AHEAD, NO_TOKEN, DecodePipeline, RowState, bucket, can_sample
from engine.fake.checker import PlanChecker
from engine.ipc.events import Failure
from engine.kv.page_pool import PagePool
from engine.scheduling.plan import Row, RowResult, StepPlan, StepResult
from engine.scheduling.scheduler import Limits, Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_state import SequenceState, SequenceTable
from engine.settings import PAGE_SIZE
from tests.engine.stepped import holding, put

VOCABULARY, RING = 5000, 64
STOPPED, FULL = 1, 2
SICK = 13  # a token that is no number


def after(tokens: Rows[int]) -> int:
    """The token that follows."""
    digest = 17
    for token in tokens:
        digest = (digest * 48271 + token + 1) % (2**31 - 1)
    return digest % VOCABULARY


@dataclass
class DeviceRow:
    """A row in the device's own memory."""

    token: int = 0
    position: int = -1
    last: int = 0
    stops: tuple[int, ...] = ()
    free_from: int = 0  # the first place where a stop token ends the row
    count: int = 0
    pages: dict[int, int] = field(default_factory=dict)


class SlowDevice:
    """Does what it was told when it feels like it, in order. Traps as the kernels do."""

    def __init__(self, seed: int, pages: int, sick: int = -1, beside: SlowDevice | None = None) -> None:
        self.random = random.Random(seed)
        # Pipelines on the same device share its memory and its stream.
        self.slots = [[-1] * PAGE_SIZE for _ in range(pages)] if beside is None else beside.slots
        self.queue: list[Callable[[], None]] = [] if beside is None else beside.queue
        self.buckets = {size: [DeviceRow() for _ in range(size)] for size in (1, 2, 4, 8)}
        self.rings: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.here = 1  # as the host knows
        self.sick = sick
        self.written = self.launched = 0
        self.sizes: list[int] = []

    # What the pipeline asks for

    def write(self, states: Rows[RowState], number: int) -> None:
        self.here = bucket(len(states))
        self.written += 1
        rows = self.buckets[self.here]
        for state in states:
            known = [*state.sequence.token_ids, *state.unreported]
            assert (state.position, state.token) == (len(known) - 1, known[-1])
        if number == 0:
            self.flush()
            self.rings.clear()

        def write() -> None:
            for own in rows:
                own.position, own.count = -1, number
            for own, state in zip(rows, states, strict=False):
                own.token, own.position, own.last = state.token, state.position, state.last_position
                own.stops = state.stops
                own.free_from = state.sequence.prompt_length + state.sequence.stopping.min_tokens
                own.pages.update(enumerate(state.pages))

        self.queue.append(write)

    def add_pages(self, index: int, first: int, pages: Rows[int]) -> None:
        held, added = self.buckets[self.here][index].pages, list(pages)
        self.queue.append(lambda: held.update(enumerate(added, first)))

    def launch(self, steps: int, longest: int) -> None:
        width = self.here
        self.launched += steps
        self.sizes.append(steps)
        for _ in range(steps):
            self.queue.append(lambda: self._step(width, longest))

    def poll(self, index: int, number: int) -> int | None:
        for _ in range(self.random.choice((0, 0, 0, 1, 3))):
            if self.queue:
                self.queue.pop(0)()
        found, entry = self.rings.get((self.here, index, (number - 1) % RING), (0, 0))
        return entry if found == number else None

    def wait(self) -> None:
        if not self.queue:
            raise EngineFailed("nothing is under way")
        self.queue.pop(0)()

    # What the others do on the same stream

    def flush(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def prefill(self, row: Row, sequence: SequenceState) -> RowResult:
        """Eager: in order, and waited for."""
        pages, ids = list(sequence.pages), list(sequence.token_ids)
        self.flush()
        for at in range(row.start, row.start + row.count):
            self.slots[pages[at // PAGE_SIZE]][at % PAGE_SIZE] = ids[at]
        if not row.sample:
            return RowResult(())
        token = after([self.slots[pages[at // PAGE_SIZE]][at % PAGE_SIZE] for at in range(row.start + row.count)])
        return RowResult(() if token % 100 == self.sick else (token,))

    def _step(self, width: int, longest: int) -> None:
        for at, own in enumerate(self.buckets[width]):
            if own.position < 0:
                continue
            place = own.position
            assert place < longest, "a row outgrew its launch"
            self.slots[own.pages[place // PAGE_SIZE]][place % PAGE_SIZE] = own.token
            read = [self.slots[own.pages[one // PAGE_SIZE]][one % PAGE_SIZE] for one in range(place + 1)]
            token = after(read)
            flags = NO_TOKEN if token % 100 == self.sick else 0
            flags |= STOPPED if not flags and token in own.stops and place + 1 >= own.free_from else 0
            flags |= FULL if place + 1 >= own.last else 0
            own.count += 1
            own.token, own.position = token, -1 if flags else place + 1
            self.rings[width, at, (own.count - 1) % RING] = own.count, flags << 24 | token


class SlowRunner:
    """Shares rows between pipelines and prefill as the runner does."""

    def __init__(self, devices: Rows[SlowDevice], max_context: int) -> None:
        self.device, self.devices = devices[0], devices
        self.sequences = SequenceTable()
        self.checker, self.checked = PlanChecker(len(self.device.slots), 32), True
        self.pipelines = [DecodePipeline(device, self.sequences, max_context) for device in devices]
        self.alternating, self.pipeline = AlternatingPipelines(self.pipelines), self.pipelines[0]

    def run(self, plan: StepPlan) -> StepResult:
        if not self.checked:
            return self._run(plan)
        self.checker.begin(plan)
        for row in plan.rows:
            self.checker.feed(row)
        result = self._run(plan)
        self.checker.result(plan, result)
        return result

    def _run(self, plan: StepPlan) -> StepResult:
        self.sequences.apply(plan)
        of = self.sequences.of
        mine = [row for row in plan.rows if row.count == 1 and row.sample and can_sample(of(row))]
        if len(mine) > self.alternating.most_rows:
            mine = []
        results = self.alternating.step(mine) if mine else {}
        for row in plan.rows:
            if row.key not in results:
                found = self.device.prefill(row, of(row))
                results |= {row.key: found} if row.sample else {}
        self.sequences.append(plan.rows, results)
        return StepResult(results)


def request(prompt: Rows[int], **stopping: object) -> GenerationRequest:
    given = Stopping(**{"max_tokens": 40, **stopping})  # type: ignore[arg-type]
    return GenerationRequest(request_id="", token_ids=tuple(prompt), sampling=GREEDY, stopping=given, arrived_at=0.0)


def answer(asked: GenerationRequest, max_context: int, sick: int) -> tuple[list[int], FinishReason | None]:
    """What must come; None: it fails after that."""
    tokens = list(asked.token_ids)
    while True:
        token = after(tokens)
        made = len(tokens) - len(asked.token_ids)
        if token % 100 == sick:
            return tokens[len(asked.token_ids) :], None
        tokens.append(token)
        if token in asked.stopping.stop_token_ids and made >= asked.stopping.min_tokens:
            return tokens[len(asked.token_ids) :], FinishReason.STOP
        if made + 1 == asked.stopping.max_tokens or len(tokens) == max_context:
            return tokens[len(asked.token_ids) :], FinishReason.LENGTH


class Life:
    """Some sequences through a real scheduler, with everything that can happen to them."""

    def __init__(self, seed: int, pages: int, lookahead: int, sick: int, pipelines: int = 1) -> None:
        self.random = random.Random(seed)
        self.sick = sick
        self.max_context = min(150, pages * PAGE_SIZE)
        self.device = SlowDevice(seed, pages, sick)
        others = [SlowDevice(seed + at, pages, sick, self.device) for at in range(1, pipelines)]
        self.runner = SlowRunner([self.device, *others], self.max_context)
        limits = Limits(
            max_sequences=self.random.choice((1, 3, 8, 10) if pipelines == 1 else (9, 12, 16, 20)),
            max_batch_tokens=self.random.choice((5, 64)),
            max_context=self.max_context,
            lookahead_tokens=lookahead,
            max_tokens_per_row=2 * AHEAD,
        )
        self.scheduler = Scheduler(limits, PagePool(pages))
        self.asked: list[GenerationRequest] = []
        self.got: list[list[int]] = []
        self.ended: dict[int, FinishReason | None] = {}
        self.gone: set[int] = set()
        self.now = 0.0

    def admit(self) -> None:
        prompt = [self.random.randrange(VOCABULARY) for _ in range(self.random.choice((1, 2, 15, 16, 17, 40)))]
        asked = request(
            prompt, max_tokens=self.random.choice((1, 2, 17, 60, 500)), min_tokens=self.random.choice((0, 9))
        )
        likely = answer(asked, self.max_context, self.sick)[0]
        if likely and self.random.random() < 0.5:
            stops = tuple(self.random.sample(likely, min(3, len(likely))))
            asked = replace(asked, stopping=replace(asked.stopping, stop_token_ids=stops))
        self.scheduler.admit(Sequence(asked, list(asked.token_ids), key=len(self.asked)))
        self.asked.append(asked)
        self.got.append([])

    def disturb(self) -> None:
        if not self.asked:
            return
        key = self.random.randrange(len(self.asked))
        what = self.random.random()
        if what < 0.3:
            self.scheduler.cancel(key)
            self.gone.add(key)
        elif what < 0.6:
            self.scheduler.pause(key)
        else:
            self.scheduler.resume(key)

    def step(self) -> bool:
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return False
        self.now += 0.01
        for event in self.scheduler.commit(plan, self.runner.run(plan), self.now):
            self.got[event.key] += event.token_ids
            if event.finish is not None:
                self.ended[event.key] = event.finish.reason
            elif event.failure is Failure.STEP:
                self.ended[event.key] = None
        return True

    def check(self) -> None:
        for key, asked in enumerate(self.asked):
            ids, reason = answer(asked, self.max_context, self.sick)
            if key in self.ended:
                assert (self.got[key], self.ended[key]) == (ids, reason)
            else:
                assert key in self.gone
                assert self.got[key] == ids[: len(self.got[key])]


@given(
    seed=some.integers(0, 2**32),
    pages=some.integers(6, 60),
    ahead=some.sampled_from((0, 3, 15)),
    sick=some.sampled_from((-1, SICK)),
    pipelines=some.sampled_from((1, 2)),
)
@examples(max_examples=160)
def test_whatever_happens_each_answer_is_its_own(seed: int, pages: int, ahead: int, sick: int, pipelines: int) -> None:
    life = Life(seed, pages * pipelines, ahead, sick, pipelines)
    for _ in range(life.random.randrange(1, 12 * pipelines)):
        life.admit()
    for _ in range(60):
        if life.random.random() < 0.2:
            life.disturb()
        if life.random.random() < 0.1:
            life.admit()
        life.step()
    for key in range(len(life.asked)):
        life.scheduler.resume(key)
    while life.step():
        pass
    life.check()


def alone(prompt: Rows[int], pages: int = 40, lookahead: int = 2 * AHEAD - 1, **stopping: object) -> Life:
    life = Life(1, pages, lookahead, -1)
    asked = request(prompt, **stopping)
    life.scheduler.admit(Sequence(asked, list(asked.token_ids), key=0))
    life.asked.append(asked)
    life.got.append([])
    return life


def test_a_lone_row_is_written_once_and_the_device_kept_busy() -> None:
    life = alone([5, 6, 7], max_tokens=120)
    life.step()
    idle = 0
    while len(life.got[0]) < 100:
        life.step()
        pipeline = life.runner.pipeline
        idle += pipeline._launched == pipeline._read
        assert pipeline._launched - pipeline._read <= AHEAD
    while life.step():
        pass
    life.check()
    assert life.device.written == 1
    assert idle == 0
    assert life.device.launched == 119  # no step beyond the last, none twice; the first token was the prompt's
    assert life.device.sizes.count(4) > 20


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
        self.pipeline = DecodePipeline(self.device, self.table, 150)
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
    pipeline = life.runner.pipeline
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
    life.device.launch = lambda steps, longest: None  # type: ignore[method-assign]
    with pytest.raises(EngineFailed):
        life.step()
    del life.device.launch
    while life.step():
        pass
    life.check()


def test_stops_and_logprobs_that_the_kernels_do_not_know() -> None:
    def able(asked: GenerationRequest) -> bool:
        return can_sample(put(SequenceTable(), holding(asked, [0])))

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


def test_drafts_are_refused_not_passed_over() -> None:
    lone = Lone(6, [4], 24, 2)
    with pytest.raises(Unsupported, match="draft"):
        lone.pipeline.step([Row(0, 0, 0, 1, True, draft=(5,))])


def many(table: SequenceTable, count: int) -> tuple[list[SequenceState], list[GenerationRequest]]:
    asked = [request([key], max_tokens=140) for key in range(count)]
    return [put(table, holding(one, range(10 * key, 10 * key + 10), key)) for key, one in enumerate(asked)], asked


def test_two_pipelines_share_what_one_cannot_hold() -> None:
    device = SlowDevice(8, 160)
    runner = SlowRunner([device, SlowDevice(9, 160, beside=device)], 150)
    states, asked = many(runner.sequences, 16)
    cases = ((8, (8, None)), (9, (8, 1)), (16, (8, 8)), (16, (8, 8)), (12, None), (9, None), (3, (4, None)))
    for rows, buckets in cases:
        for _ in range(3):
            moved_on(runner.alternating.step, states[:rows])
        for at, (pipeline, own) in enumerate(zip(runner.pipelines, runner.devices, strict=True)):
            assert pipeline._launched - pipeline._read <= (AHEAD if rows <= 8 else AHEAD_IN_TURN)
            if buckets is not None:
                assert (own.here if pipeline._held else None) == buckets[at]
        written = [own.written for own in runner.devices]
        moved_on(runner.alternating.step, states[:rows])
        assert [own.written for own in runner.devices] == written  # rows that go on stay where they are
    assert all(map(is_right, states, asked))


def test_one_pipeline_that_fails_leaves_the_other_sound() -> None:
    device = SlowDevice(10, 160)
    runner = SlowRunner([device, SlowDevice(11, 160, beside=device)], 150)
    states, asked = many(runner.sequences, 10)

    def several(times: int) -> None:
        for _ in range(times):
            moved_on(runner.alternating.step, states)

    several(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.devices[1], "launch", lambda steps, longest: None)
        with pytest.raises(EngineFailed):
            several(4)
    several(5)
    assert all(map(is_right, states, asked))


def test_fewer_rows_take_a_smaller_bucket() -> None:
    device, table = SlowDevice(7, 80), SequenceTable()
    pipeline = DecodePipeline(device, table, 150)
    states, asked = many(table, 8)
    for rows in (8, 5, 4, 3, 2, 1, 6):
        for _ in range(2):
            moved_on(pipeline.step, states[:rows])
        assert device.here == bucket(rows)
    assert all(map(is_right, states, asked))
