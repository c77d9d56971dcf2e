"""One stream that somebody watches beside a flood of the background, on a make-believe device."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine.api import Priority
from engine.fake import FakeRunner, plain_request
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.plan import StepPlan
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.settings import EngineSettings, FakeSettings

MOST = 64


def cost(rows: int, fed: int) -> float:
    """A row alone takes 0.5 ms, 64 take 3.8; 200 prompt tokens 2.5."""
    return (0.0005 + 0.00005 * (rows - 1) if rows else 0.0) + (0.0005 + 0.00001 * fed if fed else 0.0)


class Device:
    """A scheduler whose clock goes on by what steps take."""

    def __init__(self) -> None:
        fake = FakeSettings(max_context=4096, total_pages=8192)
        self.runner = FakeRunner(EngineSettings(model="", kind="fake", max_sequences=MOST, fake=fake))
        limits = Limits(max_sequences=MOST, max_batch_tokens=2048, max_context=4096)
        self.scheduler, self.now = Scheduler(limits, PagePool(8192)), 5.0
        self.late = 0.0  # seconds that each of six steps takes longer after one of many rows, which is still under way
        self._late = 0  # of those, how many are to come
        self.times: dict[int, list[float]] = {}  # of each token
        self.over: set[int] = set()

    def ask(self, priority: Priority, count: int = 1, output: int = 200, prompt: int = 40) -> list[int]:
        keys = list(range(len(self.times), len(self.times) + count))
        for key in keys:
            ids = tuple(1 + (key + at) % 120 for at in range(prompt))
            request = plain_request(ids, output, arrived_at=self.now, priority=priority)
            self.scheduler.admit(Sequence(request, list(ids), key=key))
            self.times[key] = []
        return keys

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(self.now)
        assert plan is not None
        rows = sum(row.count == 1 for row in plan.rows)
        self.now += cost(rows, sum(row.count for row in plan.rows) - rows) + (self.late if self._late else 0.0)
        self._late = 6 if rows > 16 else max(0, self._late - 1)
        for event in self.scheduler.commit(plan, self.runner.run(plan), self.now):
            assert event.failure is None
            self.times[event.key] += [self.now] * len(event.token_ids)
            if event.finish is not None:
                self.over.add(event.key)
        return plan

    def until_over(self, keys: list[int]) -> None:
        while not self.over.issuperset(keys):
            self.step()

    def pace(self, key: int) -> float:
        """Seconds a token after the first."""
        times = self.times[key]
        return (times[-1] - times[0]) / (len(times) - 1)

    def made(self, keys: list[int]) -> int:
        return sum(len(self.times[key]) for key in keys)


@pytest.mark.product
def test_one_that_is_watched_stays_near_its_own_pace_and_the_background_goes_on() -> None:
    device = Device()
    (alone,) = device.ask(Priority.INTERACTIVE)
    device.until_over([alone])
    crowd = device.ask(Priority.BACKGROUND, 2 * MOST, output=600)
    for _ in range(50):
        device.step()
    paces = []
    for _ in range(5):
        before = device.made(crowd)
        watched = device.ask(Priority.INTERACTIVE, output=400)
        device.until_over(watched)
        paces.append(device.pace(watched[0]) / device.pace(alone))
        assert device.made(crowd) - before >= 400, "at least as many tokens as the one beside it"
    assert max(paces) <= 1.5
    device.until_over(crowd)
    assert device.made(crowd) == 2 * MOST * 600


def test_steps_that_are_late_behind_the_backgrounds_own_are_not_taken_for_what_one_alone_takes() -> None:
    device = Device()
    (alone,) = device.ask(Priority.INTERACTIVE)
    device.until_over([alone])
    device.late = 0.0015
    crowd = device.ask(Priority.BACKGROUND, 2 * MOST, output=600)
    for _ in range(50):
        device.step()
    watched = device.ask(Priority.INTERACTIVE, output=400)
    device.until_over(watched)
    before = device.made(crowd)
    watched = device.ask(Priority.INTERACTIVE, output=400)
    device.until_over(watched)
    assert device.pace(watched[0]) <= 1.5 * device.pace(alone)
    assert device.made(crowd) - before >= 400


def test_the_backgrounds_prompts_are_computed_beside_it_a_little_at_a_time() -> None:
    device = Device()
    (alone,) = device.ask(Priority.INTERACTIVE)
    device.until_over([alone])
    watched = device.ask(Priority.INTERACTIVE, output=3000)
    device.step()
    crowd = device.ask(Priority.BACKGROUND, 4, output=9, prompt=1000)
    device.until_over(watched)
    assert device.over.issuperset(crowd), "nobody starves"
    assert device.pace(watched[0]) <= 1.5 * device.pace(alone)
    gaps = [after - before for before, after in pairwise(device.times[watched[0]])]
    assert max(gaps) <= cost(8, 256) + 1e-9, "no more than a short chunk"


def test_others_than_the_background_yield_to_nobody() -> None:
    device = Device()
    for priority in (Priority.NORMAL, Priority.INTERACTIVE):
        device.ask(priority, 8)
        device.step()
    assert len(device.step().rows) == 16
    crowd = Device()
    crowd.ask(Priority.BACKGROUND, 8)
    crowd.ask(Priority.NORMAL, 8)
    crowd.step()
    assert len(crowd.step().rows) == 16


def test_who_is_watched_takes_a_slot_of_the_background_at_once() -> None:
    device = Device()
    crowd = device.ask(Priority.BACKGROUND, MOST, output=900)
    for _ in range(20):
        device.step()
    first, second = device.ask(Priority.INTERACTIVE, 2)
    device.step()
    assert device.times[first]
    assert device.times[second]
    assert device.scheduler.load.running == MOST
    waiting = device.ask(Priority.NORMAL)
    device.step()
    assert not device.times[waiting[0]], "others wait"
    device.until_over([*crowd, *waiting])
    assert device.made(crowd) == MOST * 900
