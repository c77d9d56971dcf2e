"""Run-ahead without a card: a slow make-believe one, whose tokens depend on every slot that a row reads."""

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
from engine.errors import EngineFailed
from engine.execution.graph_decode.alternating import AHEAD_IN_TURN, AlternatingPipelines
from engine.execution.graph_decode.pipeline import AHEAD, NO_TOKEN, DecodePipeline, RowState, bucket, can_sample
from engine.ipc.events import Failure
from engine.kv.page_pool import PagePool
from engine.scheduling.plan import Row, RowResult, StepPlan, StepResult
from engine.scheduling.scheduler import Limits, Scheduler
from engine.scheduling.sequence import Sequence
from engine.settings import PAGE_SIZE

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
class Chair:
    """A row of the card's own memory."""

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
        # Seats of the same device share its memory and its stream.
        self.slots = [[-1] * PAGE_SIZE for _ in range(pages)] if beside is None else beside.slots
        self.queue: list[Callable[[], None]] = [] if beside is None else beside.queue
        self.benches = {size: [Chair() for _ in range(size)] for size in (1, 2, 4, 8)}
        self.rings: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.here = 1  # as the host knows
        self.sick = sick
        self.placed = self.launched = 0
        self.sizes: list[int] = []

    # What the pipeline asks for

    def place(self, seats: Rows[RowState], number: int) -> None:
        self.here = bucket(len(seats))
        self.placed += 1
        chairs = self.benches[self.here]
        for seat in seats:
            told = [*seat.sequence.token_ids, *seat.fresh]
            assert (seat.position, seat.token) == (len(told) - 1, told[-1])
        if number == 0:
            self.flush()
            self.rings.clear()

        def write() -> None:
            for chair in chairs:
                chair.position, chair.count = -1, number
            for chair, seat in zip(chairs, seats, strict=False):
                chair.token, chair.position, chair.last = seat.token, seat.position, seat.last_position
                chair.stops = seat.stops
                asked = seat.sequence.request
                chair.free_from = len(asked.token_ids) + asked.stopping.min_tokens
                chair.pages.update(enumerate(seat.pages))

        self.queue.append(write)

    def add_pages(self, seat: int, first: int, pages: Rows[int]) -> None:
        held, fresh = self.benches[self.here][seat].pages, list(pages)
        self.queue.append(lambda: held.update(enumerate(fresh, first)))

    def launch(self, steps: int, longest: int) -> None:
        width = self.here
        self.launched += steps
        self.sizes.append(steps)
        for _ in range(steps):
            self.queue.append(lambda: self._step(width, longest))

    def poll(self, seat: int, number: int) -> int | None:
        for _ in range(self.random.choice((0, 0, 0, 1, 3))):
            if self.queue:
                self.queue.pop(0)()
        found, entry = self.rings.get((self.here, seat, (number - 1) % RING), (0, 0))
        return entry if found == number else None

    def wait(self) -> None:
        if not self.queue:
            raise EngineFailed("nothing is under way")
        self.queue.pop(0)()

    # What the others do on the same stream

    def flush(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def prefill(self, row: Row) -> RowResult | None:
        """Eager: in order, and waited for."""
        pages, ids = list(row.sequence.pages), list(row.sequence.token_ids)
        self.flush()
        for at in range(row.start, row.start + row.count):
            self.slots[pages[at // PAGE_SIZE]][at % PAGE_SIZE] = ids[at]
        if not row.sample:
            return None
        token = after([self.slots[pages[at // PAGE_SIZE]][at % PAGE_SIZE] for at in range(row.start + row.count)])
        return RowResult(() if token % 100 == self.sick else (token,))

    def _step(self, width: int, longest: int) -> None:
        for at, chair in enumerate(self.benches[width]):
            if chair.position < 0:
                continue
            place = chair.position
            assert place < longest, "a row outgrew its launch"
            self.slots[chair.pages[place // PAGE_SIZE]][place % PAGE_SIZE] = chair.token
            read = [self.slots[chair.pages[one // PAGE_SIZE]][one % PAGE_SIZE] for one in range(place + 1)]
            token = after(read)
            flags = NO_TOKEN if token % 100 == self.sick else 0
            flags |= STOPPED if not flags and token in chair.stops and place + 1 >= chair.free_from else 0
            flags |= FULL if place + 1 >= chair.last else 0
            chair.count += 1
            chair.token, chair.position = token, -1 if flags else place + 1
            self.rings[width, at, (chair.count - 1) % RING] = chair.count, flags << 24 | token


class SlowRunner:
    """Shares rows between pipelines and prefill as the runner does."""

    def __init__(self, cards: Rows[SlowDevice], max_context: int) -> None:
        self.card, self.cards = cards[0], cards
        self.pipelines = [DecodePipeline(card, max_context) for card in cards]
        self.alternating, self.pipeline = AlternatingPipelines(self.pipelines), self.pipelines[0]

    def run(self, plan: StepPlan) -> StepResult:
        self.alternating.forget(plan.fresh_slots)
        mine = [row for row in plan.rows if row.count == 1 and row.sample and can_sample(row)]
        if len(mine) > self.alternating.seats:
            mine = []
        results: dict[int, RowResult | None] = {}
        if mine:
            found = self.alternating.step(mine)
            results |= {id(row): result for row, result in zip(mine, found, strict=True)}
        results |= {id(row): self.card.prefill(row) for row in plan.rows if id(row) not in results}
        return StepResult(tuple(results[id(row)] for row in plan.rows))


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

    def __init__(self, seed: int, pages: int, tokens_per_step: int, sick: int, pipelines: int = 1) -> None:
        self.random = random.Random(seed)
        self.sick = sick
        self.max_context = min(150, pages * PAGE_SIZE)
        self.card = SlowDevice(seed, pages, sick)
        others = [SlowDevice(seed + at, pages, sick, self.card) for at in range(1, pipelines)]
        self.runner = SlowRunner([self.card, *others], self.max_context)
        limits = Limits(
            max_sequences=self.random.choice((1, 3, 8, 10) if pipelines == 1 else (9, 12, 16, 20)),
            max_batch_tokens=self.random.choice((5, 64)),
            max_context=self.max_context,
            tokens_per_step=tokens_per_step,
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
    ahead=some.sampled_from((1, 4, 16)),
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


def alone(prompt: Rows[int], pages: int = 40, tokens_per_step: int = 2 * AHEAD, **stopping: object) -> Life:
    life = Life(1, pages, tokens_per_step, -1)
    asked = request(prompt, **stopping)
    life.scheduler.admit(Sequence(asked, list(asked.token_ids), key=0))
    life.asked.append(asked)
    life.got.append([])
    return life


def test_a_lone_row_is_placed_once_and_the_card_kept_busy() -> None:
    life = alone([5, 6, 7], max_tokens=120)
    life.step()
    idle = 0
    while len(life.got[0]) < 100:
        life.step()
        pipeline = life.runner.pipeline
        idle += pipeline._launched == pipeline._told
        assert pipeline._launched - pipeline._told <= AHEAD
    while life.step():
        pass
    life.check()
    assert life.card.placed == 1
    assert idle == 0
    assert life.card.launched == 119  # no step beyond the last, none twice; the first token was the prompt's
    assert life.card.sizes.count(4) > 20


def test_a_stop_ends_the_row_on_the_card() -> None:
    ids, _ = answer(request([9, 9]), 150, -1)
    life = alone([9, 9], max_tokens=100, stop_token_ids=(ids[20],))
    while life.step():
        pass
    life.card.flush()
    assert life.got[0] == ids[: ids.index(ids[20]) + 1]
    assert all(chair.position == -1 for chairs in life.card.benches.values() for chair in chairs)


def test_pages_that_others_took_meanwhile_are_not_believed() -> None:
    """Preempted under way, its pages used by another, then given back the same: nothing old may be delivered."""
    card = SlowDevice(3, 12)
    pipeline = DecodePipeline(card, 150)
    asked = request(range(20), max_tokens=100)
    sequence = Sequence(asked, list(asked.token_ids), slot=0, pages=list(range(4)))
    wanted, _ = answer(asked, 150, -1)
    first = card.prefill(Row(sequence, 0, 20, True))
    assert first is not None
    sequence.token_ids += first.token_ids
    start = 20
    for _ in range(3):
        (found,) = pipeline.step([Row(sequence, start, 1, True)])
        sequence.token_ids += found.token_ids
        start += len(found.token_ids)
    card.flush()
    for page in range(4):
        card.slots[page] = [777] * PAGE_SIZE
    card.prefill(Row(sequence, 0, start, False))
    pipeline.forget([0])
    while start < 60:
        (found,) = pipeline.step([Row(sequence, start, 1, True)])
        sequence.token_ids += found.token_ids
        start += len(found.token_ids)
    assert sequence.token_ids[20:] == wanted[: len(sequence.token_ids) - 20]


def test_numbers_begin_anew_before_they_overflow() -> None:
    life = alone([1, 2], max_tokens=100)
    pipeline = life.runner.pipeline
    life.step()
    life.step()
    pipeline._number = (1 << 30) - 2
    pipeline.forget([0])
    while life.step():
        if life.card.placed < 6:
            pipeline.forget([0])
    life.check()
    assert pipeline._number < 200


def test_a_card_that_ends_without_a_token_is_a_failure() -> None:
    life = alone([1, 2], max_tokens=100)
    life.step()
    life.card.launch = lambda steps, longest: None  # type: ignore[method-assign]
    with pytest.raises(EngineFailed):
        life.step()
    del life.card.launch
    while life.step():
        pass
    life.check()


def test_stops_and_logprobs_that_the_kernels_do_not_know() -> None:
    def able(asked: GenerationRequest) -> bool:
        return can_sample(Row(Sequence(asked, [1]), 0, 1, True))

    assert able(request([1], stop_token_ids=tuple(range(8))))
    assert not able(request([1], stop_token_ids=tuple(range(9))))
    assert not able(replace(request([1]), logprobs=0))
    assert able(request([1], stop_token_ids=(3,), min_tokens=4))
    assert able(replace(request([1]), sampling=replace(GREEDY, temperature=0.7, top_p=0.5, logit_bias=((1, 2.0),))))


def stepped(pipeline: DecodePipeline, sequence: Sequence, at_least: int) -> None:
    """Steps a row that the pipeline has alone."""
    goal = len(sequence.token_ids) + at_least
    while len(sequence.token_ids) < goal:
        (found,) = pipeline.step([Row(sequence, len(sequence.token_ids) - 1, 1, True)])
        sequence.token_ids += found.token_ids


def test_a_row_that_another_decoder_moved_on_is_seated_anew() -> None:
    card = SlowDevice(5, 12)
    pipeline = DecodePipeline(card, 150)
    asked = request([4], max_tokens=100)
    sequence = Sequence(asked, [4], slot=0, pages=list(range(8)))
    for between in (1, 3, AHEAD, AHEAD + 5):
        stepped(pipeline, sequence, 9)
        for _ in range(between):
            found = card.prefill(Row(sequence, len(sequence.token_ids) - 1, 1, True))
            assert found is not None
            sequence.token_ids += found.token_ids
    stepped(pipeline, sequence, 9)
    assert sequence.token_ids[1:] == answer(asked, 150, -1)[0][: len(sequence.token_ids) - 1]
    assert card.placed == 5


def test_pages_exchanged_in_place_are_noticed() -> None:
    card = SlowDevice(6, 24)
    pipeline = DecodePipeline(card, 150)
    asked = request([4], max_tokens=100)
    sequence = Sequence(asked, [4], slot=0, pages=list(range(8)))
    stepped(pipeline, sequence, 20)
    card.flush()
    card.slots[20], card.slots[0] = card.slots[0], [777] * PAGE_SIZE
    sequence.pages[0] = 20
    stepped(pipeline, sequence, 20)
    assert sequence.token_ids[1:] == answer(asked, 150, -1)[0][: len(sequence.token_ids) - 1]


def many(count: int) -> list[Sequence]:
    asked = [request([key], max_tokens=140) for key in range(count)]
    pages = [list(range(10 * key, 10 * key + 10)) for key in range(count)]
    return [Sequence(one, [key], slot=key, pages=pages[key], key=key) for key, one in enumerate(asked)]


def moved_on(step: Callable[[list[Row]], list[RowResult]], sequences: Rows[Sequence]) -> None:
    plan = [Row(one, len(one.token_ids) - 1, 1, True) for one in sequences]
    for row, found in zip(plan, step(plan), strict=True):
        assert found.token_ids
        row.sequence.token_ids += found.token_ids


def test_two_flights_share_what_one_cannot_seat() -> None:
    card = SlowDevice(8, 160)
    runner = SlowRunner([card, SlowDevice(9, 160, beside=card)], 150)
    sequences = many(16)
    for rows, seats in ((8, (8, None)), (9, (8, 1)), (16, (8, 8)), (16, (8, 8)), (12, None), (9, None), (3, (4, None))):
        for _ in range(3):
            moved_on(runner.alternating.step, sequences[:rows])
        for at, (pipeline, own) in enumerate(zip(runner.pipelines, runner.cards, strict=True)):
            assert pipeline._launched - pipeline._told <= (AHEAD if rows <= 8 else AHEAD_IN_TURN)
            if seats is not None:
                assert (own.here if pipeline._lanes else None) == seats[at]
        placed = [own.placed for own in runner.cards]
        moved_on(runner.alternating.step, sequences[:rows])
        assert [own.placed for own in runner.cards] == placed  # rows that go on stay where they are
    for sequence in sequences:
        assert sequence.token_ids[1:] == answer(sequence.request, 150, -1)[0][: len(sequence.token_ids) - 1]


def test_one_flight_that_fails_leaves_the_other_sound() -> None:
    card = SlowDevice(10, 160)
    runner = SlowRunner([card, SlowDevice(11, 160, beside=card)], 150)
    sequences = many(10)

    def several(times: int) -> None:
        for _ in range(times):
            moved_on(runner.alternating.step, sequences)

    several(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.cards[1], "launch", lambda steps, longest: None)
        with pytest.raises(EngineFailed):
            several(4)
    several(5)
    for sequence in sequences:
        assert sequence.token_ids[1:] == answer(sequence.request, 150, -1)[0][: len(sequence.token_ids) - 1]


def test_fewer_rows_take_fewer_seats() -> None:
    card = SlowDevice(7, 80)
    pipeline = DecodePipeline(card, 150)
    sequences = many(8)
    for rows in (8, 5, 4, 3, 2, 1, 6):
        for _ in range(2):
            moved_on(pipeline.step, sequences[:rows])
        assert card.here == bucket(rows)
    for sequence in sequences:
        assert sequence.token_ids[1:] == answer(sequence.request, 150, -1)[0][: len(sequence.token_ids) - 1]
