"""An engine in one process whose keys and values may outlive it, and a store made of a dict."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from cache.api import BlockLayout, BlockRun, Fetched
from engine.fake import FakeRunner, plain_request
from engine.ipc.events import Event
from engine.kv.page_pool import PagePool
from engine.kv.prefix_index import PrefixIndex
from engine.kv.shared_tier import BlockTier
from engine.scheduling.limits import Limits
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence as Live
from engine.settings import PAGE_SIZE, EngineSettings, FakeSettings

CHUNK = 128  # tokens
STEP = 2.0  # seconds that a step is said to take: so slow that the gate fetches over the slowest of links
TEXT = tuple(1 + at * at % 251 for at in range(700))


class DictStore:
    """A BlockStore that does as the test says. What it holds is shared with others made from the same dict."""

    def __init__(self, held: dict[tuple[str, bytes], bytes], layout: BlockLayout) -> None:
        self.held = held
        self.layout = layout
        self.waits: float | None = 5.0  # what `worth` says
        self.slow = False  # fetches stay open until `deliver`
        self.open: list[Callable[[], None]] = []
        self.asked: list[tuple[str, tuple[BlockRun, ...]]] = []
        self.uses: dict[tuple[str, bytes], int] = {}
        self.rates: list[tuple[int, float]] = []
        self.worth_asked: list[int] = []

    @property
    def run_tokens(self) -> int:
        return CHUNK

    def worth(self, tokens: int) -> float | None:
        self.worth_asked.append(tokens)
        return self.waits

    def fetch(
        self, partition: str, runs: Sequence[BlockRun], into: Sequence[memoryview], within: float
    ) -> Future[Fetched]:
        self.asked.append((partition, tuple(runs)))
        done: Future[Fetched] = Future()

        def deliver() -> None:
            count = 0
            for run, buffer in zip(runs, into, strict=True):
                value = self.held.get((partition, run.hash))
                if value is None:
                    break
                buffer[:] = value
                count += 1
            done.set_result(Fetched(count, 0.0))

        self.open.append(deliver)
        if not self.slow:
            self.deliver()
        return done

    def deliver(self) -> None:
        while self.open:
            self.open.pop(0)()

    def used(self, partition: str, run: BlockRun) -> bool:
        name = (partition, run.hash)
        self.uses[name] = self.uses.get(name, 0) + 1
        return self.uses[name] == 2

    def keep(self, partition: str, run: BlockRun, payload: memoryview) -> bool:
        assert len(payload) == run.tokens * self.layout.token_bytes
        self.held[partition, run.hash] = bytes(payload)
        return True

    def computed(self, tokens: int, seconds: float) -> None:
        self.rates.append((tokens, seconds))

    def close(self) -> None:
        pass


class Engine:
    """Scheduler, fake runner and tier. `spent` is what all but the runner took, in seconds."""

    def __init__(self, make: Callable[[BlockLayout], object], pages: int = 128, identity: bytes = b"model") -> None:
        fake = FakeSettings(max_context=pages * PAGE_SIZE, total_pages=pages)
        self.runner = FakeRunner(EngineSettings(model="", kind="fake", max_sequences=4, fake=fake))
        pool = PagePool(pages)
        self.index = PrefixIndex(pool, identity)
        self.store = make(self.runner.pages.layout)
        self.tier = BlockTier(self.store, self.runner.pages, self.index)  # type: ignore[arg-type]
        limits = Limits(max_sequences=4, max_batch_tokens=512, max_context=pages * PAGE_SIZE)
        self.scheduler = Scheduler(limits, pool, prefixes=self.index, tier=self.tier)
        self.events: dict[int, list[Event]] = {}
        self.spent = 0.0  # seconds in what a loop does beside its steps
        self.turns = 0  # so many times
        self.fed = 0

    def submit(self, ids: tuple[int, ...], output: int = 4, **changes: object) -> int:
        key = len(self.events) + 1
        self.events[key] = []
        request = plain_request(ids, output, **changes)
        self.timed(lambda: self.scheduler.admit(Live(request, list(ids), key=key)))
        return key

    def step(self) -> bool:
        now = time.monotonic()
        self.timed(self.scheduler.collect)
        for event in self.scheduler.expire(now):
            self.events[event.key].append(event)
        plan = self.scheduler.plan(now)
        if plan is not None:
            self.fed += sum(row.count for row in plan.rows)
            result = self.runner.run(plan)
            self.timed(
                lambda: [
                    self.events[event.key].append(event) for event in self.scheduler.commit(plan, result, now + STEP)
                ]
            )
        self.timed(self.tier.spare)
        return plan is not None

    def timed(self, act: Callable[[], object]) -> None:
        begun = time.monotonic()
        act()
        self.spent += time.monotonic() - begun
        self.turns += 1

    def run(self, within: float = 20.0) -> None:
        deadline = time.monotonic() + within
        while self.scheduler.live:
            assert time.monotonic() < deadline, "a request never ended"
            if not self.step():
                time.sleep(0.001)
        while self.tier.spare():
            pass

    def ask(self, ids: tuple[int, ...] = TEXT, output: int = 4, **changes: object) -> tuple[int, tuple[int, ...]]:
        """cached tokens and answer."""
        key = self.submit(ids, output, **changes)
        self.run()
        return self.cached(key), self.output(key)

    def cached(self, key: int) -> int:
        finish = self.events[key][-1].finish
        assert finish is not None, self.events[key]
        return finish.cached_tokens

    def output(self, key: int) -> tuple[int, ...]:
        return tuple(token_id for event in self.events[key] for token_id in event.token_ids)


def alone(ids: tuple[int, ...] = TEXT, output: int = 4) -> tuple[int, ...]:
    return Engine(lambda layout: DictStore({}, layout)).ask(ids, output)[1]
