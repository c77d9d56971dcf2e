"""Masks that are not there when a token is chosen: the row brings nothing, is fed again, and the answer is the same."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence as Items

import pytest

from engine.api import Constraint, Stopping
from engine.constraints.constraints import Constraints
from engine.fake import FakeRunner, plain_request
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.settings import EngineSettings, FakeSettings
from tests.engine.execution.counting import CountingGrammars

VOCABULARY = 256


class Late(Constraints):
    """A share of its masks is late when it is asked for, and a share is not there when a step is planned."""

    def __init__(self, share: float, seed: int) -> None:
        super().__init__(grammars=CountingGrammars(VOCABULARY))
        self.share, self.chance = share, random.Random(seed)
        self.lates = 0

    def ready(self, key: int) -> bool:
        return self.chance.random() >= self.share

    def mask(self, key: int, assumed: Items[int] = ()) -> bytearray:
        found = super().mask(key, assumed)
        if not assumed and self.chance.random() < self.share:
            self._held[key].late = True
            self.lates += 1
            return bytearray(len(found))
        return found


def answers(share: float, seed: int, pages: int) -> tuple[list[list[int]], int]:
    """Of eight sequences, every other one with a constraint; and how many masks were late."""
    constraints = Late(share, seed)
    settings = EngineSettings(model="", kind="fake", fake=FakeSettings(vocab_size=VOCABULARY, total_pages=pages))
    runner = FakeRunner(settings, constraints)
    limits = Limits(max_sequences=4, max_batch_tokens=24, max_context=100)
    scheduler = Scheduler(limits, PagePool(pages), masks=constraints)
    said: list[list[int]] = [[] for _ in range(8)]
    for key in range(8):
        form = Constraint("") if key % 2 else None
        prompt = tuple(range(32, 60 + 3 * key))
        request = plain_request(prompt, constraint=form, stopping=Stopping(max_tokens=24))
        scheduler.admit(Sequence(request, list(prompt), key=key))
    while scheduler.live:
        plan = scheduler.plan(time.monotonic())
        if plan is None:  # every sequence lacks its mask
            continue
        for event in scheduler.commit(plan, runner.run(plan), time.monotonic()):
            assert event.failure is None
            said[event.key] += event.token_ids
    runner.close()
    return said, constraints.lates


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pages", [9, 200])
def test_answers_are_the_same_however_late_masks_are(seed: int, pages: int) -> None:
    prompt, none = answers(0.0, seed, pages)
    late, some = answers(0.4, seed, pages)
    assert late == prompt
    assert none == 0 < some
