"""A slow make-believe device, whose tokens depend on every slot that a row reads, and sequences that live on it through
a real scheduler with everything that can happen to them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from engine.api import GREEDY, FinishReason, GenerationRequest, Stopping, TokenLogprob
from engine.errors import EngineFailed
from engine.execution.pipeline import MorePages, Rewrite, StepLaunch, bucket
from engine.execution.router import ALL_OPTIONS, Capacity, Executors, Role, Router, StepOptions
from engine.fake.checker import PlanChecker
from engine.ipc.events import Failure
from engine.kv.page_pool import PagePool
from engine.kv.prefix_index import PrefixIndex
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Assignment, Row, RowResult, Share, StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_state import SequenceState, SequenceTable
from engine.settings import PAGE_SIZE

VOCABULARY = 5000
STOPPED, FULL, NO_TOKEN = 1, 2, 4
RING = 64
SICK = 13  # a token that is no number


def after(tokens: Rows[int]) -> int:
    """The token that follows."""
    digest = 17
    for token in tokens:
        digest = (digest * 48271 + token + 1) % (2**31 - 1)
    return digest % VOCABULARY


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
        if not asked.stopping.max_tokens:
            return [], FinishReason.LENGTH
        tokens.append(token)
        if token in asked.stopping.stop_token_ids and made >= asked.stopping.min_tokens:
            return tokens[len(asked.token_ids) :], FinishReason.STOP
        if made + 1 == asked.stopping.max_tokens or len(tokens) == max_context:
            return tokens[len(asked.token_ids) :], FinishReason.LENGTH


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


class SlowMemory:
    """Pages, and a queue of what is to be done with them, in order, when the device feels like it."""

    def __init__(self, seed: int, pages: int, sick: int = -1, beside: SlowMemory | None = None) -> None:
        self.random = random.Random(seed)
        # Pipelines on the same device share its memory and its stream.
        self.slots = [[-1] * PAGE_SIZE for _ in range(pages)] if beside is None else beside.slots
        self.queue: list[Callable[[], None]] = [] if beside is None else beside.queue
        self.sick = sick

    def work(self) -> None:
        """A little, or nothing."""
        for _ in range(self.random.choice((0, 0, 0, 1, 3))):
            if self.queue:
                self.queue.pop(0)()

    def wait(self) -> None:
        if not self.queue:
            raise EngineFailed("nothing is under way")
        self.queue.pop(0)()

    def flush(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def choose(self, context: Rows[int], own: DeviceRow | SequenceState) -> int:
        """The token that follows a context, for a row of the device or the sequence of a prompt."""
        return after(context)

    def prefill(self, row: Row, sequence: SequenceState) -> RowResult:
        """Eager: in order, and waited for."""
        pages, ids = list(sequence.pages), list(sequence.token_ids)
        self.flush()
        for at in range(row.start, row.start + row.count):
            self.slots[pages[at // PAGE_SIZE]][at % PAGE_SIZE] = ids[at]
        if not row.sample:
            return RowResult(())
        context = [self.slots[pages[at // PAGE_SIZE]][at % PAGE_SIZE] for at in range(row.start + row.count)]
        token = self.choose(context, sequence)
        return RowResult(() if token % 100 == self.sick else (token,))

    def move_on(self, own: DeviceRow) -> int:
        """One step of a row that is not idle; flags << 24 | token."""
        place = own.position
        self.slots[own.pages[place // PAGE_SIZE]][place % PAGE_SIZE] = own.token
        token = self.choose([self.slots[own.pages[one // PAGE_SIZE]][one % PAGE_SIZE] for one in range(place + 1)], own)
        flags = NO_TOKEN if token % 100 == self.sick else 0
        flags |= STOPPED if not flags and token in own.stops and place + 1 >= own.free_from else 0
        flags |= FULL if place + 1 >= own.last else 0
        own.count += 1
        own.token, own.position = token, -1 if flags else place + 1
        return flags << 24 | token


class SlowDevice(SlowMemory):
    """Does what it was told when it feels like it, in order. Traps as the kernels do."""

    def __init__(self, seed: int, pages: int, sick: int = -1, beside: SlowDevice | None = None) -> None:
        super().__init__(seed, pages, sick, beside)
        self.buckets = {size: [DeviceRow() for _ in range(size)] for size in (1, 2, 4, 8)}
        self.rings: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.here = 1  # as the host knows
        self.written = self.launched = self.moved = 0
        self.sizes: list[int] = []

    # What the pipeline asks for

    def update(self, update: Rewrite | MorePages) -> None:
        if isinstance(update, Rewrite):
            self.write(update)
        else:
            self.add_pages(update)

    def write(self, update: Rewrite) -> None:
        states, number = update.rows, update.number
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

    def add_pages(self, more: MorePages) -> None:
        held = self.buckets[self.here][more.index].pages
        self.queue.append(lambda: held.update(enumerate(more.pages, more.first)))

    def launch(self, launch: StepLaunch) -> None:
        width, steps, longest = self.here, launch.steps, launch.longest
        self.launched += steps
        self.sizes.append(steps)
        for _ in range(steps):
            self.queue.append(lambda: self._step(width, longest))

    def poll(self, index: int, number: int) -> int | None:
        self.work()
        found, entry = self.rings.get((self.here, index, (number - 1) % RING), (0, 0))
        return entry if found == number else None

    def _step(self, width: int, longest: int) -> None:
        for at, own in enumerate(self.buckets[width]):
            if own.position >= 0:
                assert own.position < longest, "a row outgrew its launch"
                entry = self.move_on(own)
                self.moved += 1
                self.rings[width, at, (own.count - 1) % RING] = own.count, entry


class Computes(Protocol):
    """An executor of a share."""

    def run(self, share: Share) -> dict[int, RowResult]: ...


class SlowRunner:
    """Routes rows to what decodes, and prompts to eager, as the runner does."""

    def __init__(
        self,
        memory: SlowMemory,
        capacity: Capacity,
        computing: Mapping[Role, Computes],
        sequences: SequenceTable,
        executors: Executors | None = None,
        options: StepOptions = ALL_OPTIONS,
    ) -> None:
        self.memory, self.computing, self.sequences, self.options = memory, computing, sequences, options
        self.router = Router(sequences, capacity, executors or Executors({}))
        self.checker, self.checked = PlanChecker(len(memory.slots), 64), True
        self.assignments: list[Assignment] = []

    def run(self, plan: StepPlan, assignment: Assignment | None = None) -> StepResult:
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
        assignment = self.router.assign(plan, self.options)
        self.assignments.append(assignment)
        shared = [row.key for share in assignment.shares for row in share.rows]
        assert sorted(shared) == sorted(row.key for row in plan.rows), "each row is computed once"
        results: dict[int, RowResult] = {}
        for share in assignment.shares:
            if share.executor in (Role.PROMPTS, Role.EAGER):
                results |= self._prefill(share.rows)
            else:
                results |= self.computing[Role(share.executor)].run(share)
        self.sequences.append(plan.rows, results)
        return StepResult(results, assignment)

    def _prefill(self, rows: Rows[Row]) -> dict[int, RowResult]:
        found = {row.key: (row, self.memory.prefill(row, self.sequences.of(row))) for row in rows}
        return {key: self._scored(row, result) for key, (row, result) in found.items() if row.sample or row.score}

    def _scored(self, row: Row, result: RowResult) -> RowResult:
        """With how likely the prompt's tokens are, where that is wanted."""
        if not row.score:
            return result
        last = self.sequences.of(row).prompt_length - 1
        return result.scored((TokenLogprob(0.0, ()),) * (min(row.start + row.count, last) - row.start))


class Life:
    """Some sequences through a real scheduler, with everything that can happen to them."""

    def __init__(self, seed: int, runner: SlowRunner, limits: Limits, *, shared: bool = False) -> None:
        """`shared`: pages of prefixes are."""
        self.random = random.Random(seed)
        self.runner = runner
        self.max_context, self.sick = limits.max_context, runner.memory.sick
        pool = PagePool(len(runner.memory.slots))
        self.scheduler = Scheduler(limits, pool, prefixes=PrefixIndex(pool, b"model") if shared else None)
        self.cached: dict[int, int] = {}  # tokens of a prompt that were found
        self.asked: list[GenerationRequest] = []
        self.got: list[list[int]] = []
        self.scored = Counter[int]()  # tokens of prompts
        self.ended: dict[int, FinishReason | None] = {}
        self.gone: set[int] = set()
        self.now = 0.0

    def take(self, asked: GenerationRequest) -> None:
        self.scheduler.admit(Sequence(asked, list(asked.token_ids), key=len(self.asked)))
        self.asked.append(asked)
        self.got.append([])

    def admit(self) -> None:
        prompt = [self.random.randrange(VOCABULARY) for _ in range(self.random.choice((1, 2, 15, 16, 17, 40)))]
        asked = request(
            prompt, max_tokens=self.random.choice((1, 2, 17, 60, 500)), min_tokens=self.random.choice((0, 9))
        )
        likely = answer(asked, self.max_context, self.sick)[0]
        if likely and self.random.random() < 0.5:
            stops = tuple(self.random.sample(likely, min(3, len(likely))))
            asked = replace(asked, stopping=replace(asked.stopping, stop_token_ids=stops))
        if self.random.random() < 0.2:
            asked = replace(asked, prompt_logprobs=0)
            if self.random.random() < 0.5:
                asked = replace(asked, stopping=replace(asked.stopping, max_tokens=0))
        self.take(asked)

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
            self.scored[event.key] += len(event.prompt_logprobs)
            if event.start is not None:
                self.cached[event.key] = event.start.cached_tokens
            if event.finish is not None:
                self.ended[event.key] = event.finish.reason
            elif event.failure is Failure.STEP:
                self.ended[event.key] = None
        return True

    def live(self, most_admitted: int) -> None:
        """From the first sequence to the end of the last."""
        for _ in range(self.random.randrange(1, most_admitted)):
            self.admit()
        for _ in range(60):
            if self.random.random() < 0.2:
                self.disturb()
            if self.random.random() < 0.1:
                self.admit()
            self.step()
        for key in range(len(self.asked)):
            self.scheduler.resume(key)
        while self.step():
            pass

    def check(self) -> None:
        for key, asked in enumerate(self.asked):
            ids, reason = answer(asked, self.max_context, self.sick)
            if key in self.ended:
                assert (self.got[key], self.ended[key]) == (ids, reason)
                if ids or reason is not None:
                    assert self.scored[key] == (0 if asked.prompt_logprobs is None else len(asked.token_ids) - 1)
            else:
                assert key in self.gone
                assert self.got[key] == ids[: len(self.got[key])]
