"""A scheduler over the fake runner, which refuses every plan that would compute rubbish, driven by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from engine.api import FinishReason, GenerationRequest
from engine.fake import FakeRunner, plain_request
from engine.ipc.events import Event
from engine.kv.page_pool import PagePool
from engine.kv.prefix_index import PrefixIndex
from engine.scheduling.limits import Limits
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.settings import PAGE_SIZE, EngineSettings, FakeSettings

Sent = TypeVar("Sent", StepPlan, StepResult)


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
        limits = Limits(
            max_sequences=sequences,
            max_batch_tokens=batch,
            max_context=context,
            lookahead_tokens=ids - 1,
            max_tokens_per_row=ids,
        )
        self.prefixes = PrefixIndex(self.pool, enabled=prefix)
        self.scheduler = Scheduler(limits, self.pool, batching, self.prefixes)
        self.limits = limits
        self.now = 1000.0
        self.sequences: dict[int, Sequence] = {}
        self.events: dict[int, list[Event]] = {}
        self.plans: list[StepPlan] = []

    def admit(
        self,
        prompt: int = 5,
        output: int = 8,
        text: object = None,
        solo: tuple[int, int] = (0, 0),
        **changes: object,
    ) -> int:
        """Prompts with the same `text` begin alike."""
        key = len(self.sequences) + 1
        rng = random.Random(key if text is None else str(text))
        ids = tuple(rng.randrange(1, 256) for _ in range(prompt))
        request = replace(plain_request(ids, output, arrived_at=self.now), **changes)  # type: ignore[arg-type]
        self.sequences[key] = Sequence(request, list(request.token_ids), key=key, solo=solo)
        self.scheduler.admit(self.sequences[key])
        self.events[key] = []
        return key

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert not self.ended(event.key), "something came after the end"
            self.events[event.key].append(event)

    def step(self, seconds: float = 0.01, meanwhile: Callable[[], object] = lambda: None) -> StepPlan | None:
        """`meanwhile` is done while the step runs."""
        self.now += seconds
        self.take(self.scheduler.expire(self.now))
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self.plans.append(plan)
            result = sent(self.runner.run(sent(plan)))
            meanwhile()
            self.take(self.scheduler.commit(plan, result, self.now))
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


def sent(message: Sent) -> Sent:
    """As it is at the other end of a socket: equal, and made of nothing that the sender holds."""
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
    assert received == message
    return received


def alone(request: GenerationRequest, pages: int) -> list[int]:
    """What the request brings with the engine to itself and all the time: the oracle for everything below."""
    bench = Bench(pages=pages, batch=100_000, prefix=False)
    request = replace(request, deadline=None, expires_at=None)
    sequence = Sequence(request, list(request.token_ids), key=1)
    bench.sequences[1], bench.events[1] = sequence, []
    bench.scheduler.admit(sequence)
    bench.now = request.arrived_at
    bench.run()
    return bench.output(1)


def rows_of(plan: StepPlan | None) -> dict[int, tuple[int, int, bool]]:
    assert plan is not None
    return {row.key: (row.start, row.count, row.sample) for row in plan.rows}
