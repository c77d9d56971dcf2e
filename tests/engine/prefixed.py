"""Scheduler and fake runner with shared prefixes, asked one request after the other or several at once."""

from __future__ import annotations

import random

from engine.fake import FakeRunner, plain_request
from engine.ipc.events import Event
from engine.kv.page_pool import PagePool
from engine.kv.prefix_index import PrefixIndex
from engine.scheduling.limits import Limits
from engine.scheduling.plan import StepPlan
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.settings import PAGE_SIZE, EngineSettings, FakeSettings


def text(length: int, seed: object = 0) -> tuple[int, ...]:
    rng = random.Random(str(seed))
    return tuple(rng.randrange(1, 256) for _ in range(length))


class Engine:
    """Scheduler and fake runner; counts the tokens that were fed."""

    def __init__(
        self, pages: int = 64, batch: int = 512, sequences: int = 4, ids: int = 1, prefix: bool = True
    ) -> None:
        context = pages * PAGE_SIZE
        fake = FakeSettings(max_context=context, total_pages=pages, tokens_per_step=ids)
        self.runner = FakeRunner(EngineSettings(model="", kind="fake", max_sequences=sequences, fake=fake))
        self.pool = PagePool(pages)
        self.index = PrefixIndex(self.pool, b"model", prefix)
        limits = Limits(
            max_sequences=sequences,
            max_batch_tokens=batch,
            max_context=context,
            lookahead_tokens=ids - 1,
            max_tokens_per_row=ids,
        )
        self.scheduler = Scheduler(limits, self.pool, prefixes=self.index)
        self.fed = 0
        self.now = 0.0
        self.key = 0
        self.events: dict[int, list[Event]] = {}
        self.sequences: dict[int, Sequence] = {}

    def submit(self, ids: tuple[int, ...], output: int = 8, **changes: object) -> int:
        self.key += 1
        request = plain_request(ids, output, **{"arrived_at": self.now, **changes})
        self.sequences[self.key] = Sequence(request, list(ids), key=self.key)
        self.scheduler.admit(self.sequences[self.key])
        self.events[self.key] = []
        return self.key

    def step(self) -> StepPlan | None:
        self.now += 0.01
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self.fed += sum(row.count for row in plan.rows)
            self.take(self.scheduler.commit(plan, self.runner.run(plan), self.now))
        return plan

    def take(self, events: list[Event]) -> None:
        for event in events:
            self.events[event.key].append(event)

    def run(self) -> None:
        while self.step() is not None:
            pass
        assert self.scheduler.live == 0

    def output(self, key: int) -> tuple[int, ...]:
        return tuple(token_id for event in self.events[key] for token_id in event.token_ids)

    def cached(self, key: int) -> int:
        finish = self.events[key][-1].finish
        starts = [event.start for event in self.events[key] if event.start is not None]
        assert finish is not None
        assert [start.cached_tokens for start in starts] == [finish.cached_tokens]
        return finish.cached_tokens

    def ask(self, ids: tuple[int, ...], output: int = 8, **changes: object) -> tuple[int, tuple[int, ...]]:
        """cached tokens and answer of one request by itself."""
        key = self.submit(ids, output, **changes)
        self.run()
        return self.cached(key), self.output(key)


def alone(ids: tuple[int, ...], output: int = 8, **changes: object) -> tuple[int, ...]:
    return Engine(prefix=False).ask(ids, output, **changes)[1]
