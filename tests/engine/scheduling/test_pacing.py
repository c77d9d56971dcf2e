"""A target for the time between two tokens, on a make-believe device whose steps take what a test says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from engine.fake import FakeRunner, plain_request
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.plan import StepPlan
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.settings import EngineSettings, FakeSettings

Cost = Callable[[int, int], float]  # seconds of a step, by rows that decode and prompt tokens
TARGET = 0.010


def cost(rows: int, fed: int) -> float:
    """40 rows take 8 ms, and 100 prompt tokens 2 ms."""
    return (0.004 + 0.0001 * rows if rows else 0.0) + (0.001 + 0.00001 * fed if fed else 0.0)


class Device:
    """A scheduler whose clock goes on by what steps take."""

    def __init__(self, target: float | None, of: Cost = cost, most: int = 128, batch: int = 2048, ids: int = 1) -> None:
        pages = 8192
        fake = FakeSettings(max_context=4096, total_pages=pages, tokens_per_step=ids)
        self.runner = FakeRunner(EngineSettings(model="", kind="fake", max_sequences=most, fake=fake))
        limits = Limits(
            max_sequences=most,
            max_batch_tokens=batch,
            max_context=4096,
            lookahead_tokens=ids - 1,
            max_tokens_per_row=ids,
            target_tpot=target,
        )
        self.scheduler, self.of, self.now = Scheduler(limits, PagePool(pages)), of, 5.0
        self.times: dict[int, list[float]] = {}  # of each token
        self.bounds: list[int] = []

    def ask(self, count: int, prompt: int = 40, output: int = 60) -> None:
        for _ in range(count):
            key = len(self.times)
            ids = tuple(1 + (key + at) % 120 for at in range(prompt))
            request = plain_request(ids, output, arrived_at=self.now)
            self.scheduler.admit(Sequence(request, list(ids), key=key))
            self.times[key] = []

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return None
        rows = sum(row.count == 1 for row in plan.rows)
        self.now += self.of(rows, sum(row.count for row in plan.rows) - rows)
        for event in self.scheduler.commit(plan, self.runner.run(plan), self.now):
            assert event.failure is None
            self.times[event.key] += [self.now] * len(event.token_ids)
        self.bounds.append(self.scheduler.load.most_running)
        return plan

    def run(self) -> None:
        while self.step() is not None:
            pass

    def tpot(self, begun: float = 0.0) -> list[float]:
        """Of each stream that had its first token later than that, shortest first."""
        streams = [times for times in self.times.values() if len(times) > 20 and times[0] > begun]
        return sorted((one[-1] - one[0]) / (len(one) - 1) for one in streams)


def test_streams_are_as_fast_as_the_target_and_as_many_as_that_allows() -> None:
    device = Device(TARGET)
    device.ask(400)
    device.run()
    assert all(len(times) == 60 for times in device.times.values())
    assert device.tpot()[-1] <= TARGET
    assert 32 <= device.bounds[-1] <= 60
    unbound = Device(None)
    unbound.ask(400)
    unbound.run()
    assert unbound.tpot()[200] > 1.3 * TARGET
    assert set(unbound.bounds) == {128}


def test_the_bound_settles() -> None:
    device = Device(TARGET)
    for _ in range(900):
        device.ask(max(0, 100 - device.scheduler.live))
        device.step()
    settled = device.bounds[300:]
    assert sum(one != other for one, other in pairwise(settled)) <= 2
    assert min(settled) >= 30


def test_a_long_prompt_goes_in_chunks_that_leave_streams_their_time() -> None:
    gaps = []
    for target in (TARGET, None):
        device = Device(target)
        device.ask(20, output=400)
        for _ in range(120):
            device.step()
        begun = device.now
        device.ask(1, prompt=3000, output=5)
        device.run()
        assert len(device.times[20]) == 5
        after = [time for time in device.times[0] if time >= begun]
        gaps.append(max(later - time for time, later in pairwise(after)))
    assert gaps[0] <= 1.1 * TARGET
    assert gaps[1] > 2 * TARGET


@pytest.mark.product
def test_a_device_that_grows_slower_and_faster_is_followed() -> None:
    slow = 1.0

    def changing(rows: int, fed: int) -> float:
        return slow * cost(rows, fed)

    device = Device(TARGET, changing)

    def load(steps: int) -> list[float]:
        begun = device.now
        for _ in range(steps):
            device.ask(max(0, 80 - device.scheduler.live))
            device.step()
        return device.tpot(begun)

    assert load(600)[-1] <= 1.05 * TARGET
    before = device.bounds[-1]
    slow = 1.8
    load(300)
    assert load(600)[-1] <= 1.05 * TARGET
    assert device.bounds[-1] < before / 2
    slow = 1.0
    load(600)
    assert device.bounds[-1] >= 0.8 * before


def test_what_cannot_be_reached_still_goes_on_one_by_one() -> None:
    device = Device(0.001)
    device.ask(30, prompt=300, output=9)
    device.run()
    assert all(len(times) == 9 for times in device.times.values())
    assert device.bounds[-1] == 1


def test_several_ids_a_step_count_as_what_they_are() -> None:
    device = Device(TARGET, lambda rows, fed: 3 * cost(rows, fed), ids=4)
    device.ask(300)
    device.run()
    assert device.tpot()[-1] <= TARGET
    assert device.bounds[-1] >= 30


def test_pauses_between_requests_are_not_steps() -> None:
    device = Device(TARGET)
    for _ in range(30):
        device.ask(4, output=10)
        device.run()
        device.now += 60.0
    assert device.bounds[-1] >= 4


def test_prompts_that_no_step_has_room_for_wait_until_it_was_saved() -> None:
    device = Device(TARGET, lambda rows, fed: cost(rows, 0) + (0.012 + 0.00001 * fed if fed else 0.0))
    device.ask(120, prompt=200, output=100)
    device.run()
    assert all(len(times) == 100 for times in device.times.values())
    tpot = device.tpot()
    assert tpot[len(tpot) * 9 // 10] <= 1.05 * TARGET
    assert device.bounds[-1] >= 10
    device.ask(1, prompt=20, output=2000)
    device.of = lambda rows, fed: 0.0088 * (rows > 0) + 0.05 * (fed > 0)  # no chunk will ever be within the target
    while len(device.times[120]) < 50:
        device.step()
    device.ask(1, prompt=500, output=2)
    device.run()
    assert len(device.times[121]) == 2
    assert device.times[121][0] < device.times[120][-1], "a prompt waited for the end of a stream"
