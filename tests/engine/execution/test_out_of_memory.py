"""A model whose steps find no memory: answers stay what they are."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from engine.api import ModelInfo
from engine.fake import plain_request
from engine.ipc.events import Event
from engine.kv.page_pool import PagePool
from engine.kv.prefix_index import PrefixIndex, kv_identity
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Assignment, Runner, StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.settings import EngineSettings
from engine.worker.build import build
from engine.worker.loop import out_of_memory

pytestmark = pytest.mark.product

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo-draft"
TEXT = tuple(range(40, 90))


@pytest.fixture(scope="module")
def runner() -> Runner:
    settings = EngineSettings(
        model=str(DEMO), device="cpu", dtype="float32", max_sequences=4, threads=1, kv_bytes=16 << 20
    )
    return build(settings, lambda *progress: None)


def requests() -> list[Sequence]:
    """Greedy and seeded, with and without penalties, with log-probabilities; prompts of one chunk and of several."""
    chosen = []
    for number in range(6):
        plain = plain_request(TEXT[number : number + 6 + 8 * number], 36, logprobs=2 if number == 1 else None)
        if number % 2:
            sampling = replace(plain.sampling, temperature=0.8, top_p=0.9, seed=number)
        else:
            sampling = replace(plain.sampling, repetition_penalty=1.2)
        request = replace(plain, sampling=sampling)
        chosen.append(Sequence(request, list(request.token_ids), key=number + 1))
    return chosen


class Starved:
    """Every second step finds no memory: by turns before the model has run, and when it has and the last result is
    lost."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._numbers = itertools.count()
        self.failures = 0

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    def run(self, plan: StepPlan, assignment: Assignment | None = None) -> StepResult:
        number = next(self._numbers)
        if number % 2:
            return self._inner.run(plan)
        self.failures += 1
        if number % 4:
            self._inner.run(plan)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def answers(runner: Runner | Starved, pages: Runner) -> dict[int, list[Event]]:
    info = runner.info
    pool = PagePool(info.total_pages)
    limits = Limits(
        max_sequences=4,
        max_batch_tokens=16,
        max_context=info.max_context,
        lookahead_tokens=info.lookahead_tokens,
        max_tokens_per_row=info.max_tokens_per_row,
    )
    index = PrefixIndex(pool, kv_identity(info, pages.pages.layout), enabled=True)
    scheduler = Scheduler(limits, pool, True, index)
    found: dict[int, list[Event]] = {}
    for sequence in requests():
        scheduler.admit(sequence)
        found[sequence.key] = []
    now = 1000.0
    while scheduler.live:
        now += 0.01
        plan = scheduler.plan(now)
        assert plan is not None
        try:
            events = scheduler.commit(plan, runner.run(plan), now)
        except torch.OutOfMemoryError:
            events = scheduler.out_of_memory(plan)
        for event in events:
            assert event.failure is None
            found[event.key].append(event)
    return found


def ids(events: list[Event]) -> list[int]:
    return [token_id for event in events for token_id in event.token_ids]


def test_a_hundred_steps_without_memory_change_no_id(runner: Runner) -> None:
    expected = answers(runner, runner)
    starved = Starved(runner)
    found = answers(starved, runner)
    assert starved.failures > 100
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert {key: ids(events) for key, events in found.items()} == {key: ids(events) for key, events in expected.items()}
