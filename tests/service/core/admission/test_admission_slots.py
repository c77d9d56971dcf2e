"""Admission slots: as many as run and wait, what a deadline allows, and that every one comes back."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.api import Priority
from engine.errors import DeadlineExceeded
from service.config.settings import LimitOptions
from service.core.admission.admission_slots import AdmissionSlot, AdmissionSlots
from service.core.admission.pace import retry_hint
from service.core.errors import Overloaded, Reason
from tests.properties import example_count
from tests.service.core.admission.test_admission import Clock


def make(capacity: int = 2, clock: Clock | None = None, **limits: Any) -> AdmissionSlots:
    return AdmissionSlots(LimitOptions(**limits), lambda: capacity, clock or Clock())


def take(
    slots: AdmissionSlots, tokens: int = 1, deadline: float | None = None, priority: Priority = Priority.NORMAL
) -> AdmissionSlot:
    return slots.take(priority, tokens, deadline)


def fill(slots: AdmissionSlots) -> None:
    for _ in range(1000):
        take(slots)


def test_as_many_as_run_and_wait() -> None:
    slots = make(capacity=2, queued_requests=1)
    taken = [take(slots) for _ in range(3)]
    for refused in (lambda: take(slots), lambda: slots.check(Priority.INTERACTIVE, None)):
        with pytest.raises(Overloaded) as caught:
            refused()
        assert caught.value.reason == "QUEUE_FULL"
        assert 0.1 <= caught.value.retry_after <= 60
    assert slots.refusals == {"QUEUE_FULL": 2}
    with taken[0]:
        pass
    slots.check(Priority.NORMAL, None)
    take(slots)
    assert (slots.taken, slots.waiting) == (3, 3)


def test_prompt_tokens_count_until_the_first_token() -> None:
    slots = make(capacity=9, queued_prompt_tokens=100)
    first = take(slots, 1000)  # alone, so never too long
    with pytest.raises(Overloaded) as caught:
        take(slots, 1)
    assert caught.value.reason == "QUEUED_TOKENS"
    first.start()
    first.start()
    second = take(slots, 60)
    with pytest.raises(Overloaded):
        take(slots, 50)
    with second:
        pass
    take(slots, 50)
    assert (slots.taken, slots.waiting) == (2, 1)


def test_a_deadline_that_the_queue_cannot_meet() -> None:
    clock = Clock()
    slots = make(capacity=1, clock=clock)
    taken = [take(slots) for _ in range(20)]
    take(slots, deadline=100.5).__exit__(None, None, None)  # before anything is known
    for slot in taken[:10]:
        clock.now += 1.0
        slot.__exit__(None, None, None)  # one leaves a second
    take(slots, deadline=clock.now + 30)
    for refused in (lambda: take(slots, deadline=clock.now + 5), lambda: slots.check(Priority(1), clock.now + 5)):
        with pytest.raises(DeadlineExceeded, match="cannot be met"):
            refused()
    assert slots.refusals == {"DEADLINE": 2}
    take(slots, deadline=clock.now + 5, priority=Priority.INTERACTIVE)  # overtakes
    with pytest.raises(Overloaded) as caught:
        fill(slots)
    assert 30 <= caught.value.retry_after <= 60  # 250 wait; no longer than a minute is foretold


def hint(slots: AdmissionSlots) -> float:
    with pytest.raises(Overloaded) as caught:
        slots.check(Priority.NORMAL, None)
    return caught.value.retry_after


def test_a_hint_is_as_long_as_the_queue_takes_and_scattered() -> None:
    clock = Clock()
    slots = make(capacity=2, clock=clock, queued_requests=20)
    taken = [take(slots) for _ in range(22)]
    for slot in taken[:12]:
        clock.now += 0.5
        with slot:
            pass
        take(slots)
    assert 5.0 <= hint(slots) <= 10.0  # 20 wait, one leaves every half second
    later = [hint(slots) for _ in range(200)]  # who are let pass by those that come after them, for ten stays of 1 s
    assert min(later) >= 5.0
    assert max(later) <= 20.0
    assert 10.0 <= min(later[-100:]) < 11.0
    assert max(later[-100:]) > 19.0


def test_a_queue_that_does_not_move_is_not_a_fast_one() -> None:
    """Before any departure was seen, and after many quick ones."""
    clock = Clock()
    slots = make(capacity=1, clock=clock, queued_requests=10)
    taken = [take(slots) for _ in range(11)]
    assert 5 <= hint(slots) <= 10  # a stay is taken to be one second
    clock.now += 3
    assert 15 <= hint(slots) <= 30
    for slot in taken:
        clock.now += 0.01
        with slot:
            pass
        take(slots)
    assert hint(slots) <= 5
    clock.now += 60
    assert 30 <= hint(slots) <= 60


def lost(callers: int, tries: int, capacity: int, stay: float) -> int:
    """How many of them give up, who all come at once to a server that has just started, and come back as told."""
    clock = Clock()
    slots = make(capacity=capacity, clock=clock, queued_requests=0)
    gone = 0
    moments: list[tuple[float, int, Callable[[], None]]] = []
    numbers = itertools.count()

    def at(moment: float, what: Callable[[], None]) -> None:
        heapq.heappush(moments, (moment, next(numbers), what))

    def come(attempt: int) -> None:
        nonlocal gone
        try:
            slot = take(slots)
        except Overloaded as error:
            if attempt == tries:
                gone += 1
            else:
                at(clock.now + error.retry_after, lambda: come(attempt + 1))
        else:
            slot.start()
            at(clock.now + stay, lambda: slot.__exit__(None, None, None))

    for _ in range(callers):
        at(clock.now, lambda: come(1))
    while moments:
        clock.now, _, what = heapq.heappop(moments)
        what()
    return gone


def test_who_comes_back_when_told_is_served() -> None:
    """One at a time, a second each, six callers with five tries: told 100 ms each time, five of them had given up."""
    rounds = [lost(callers=6, tries=5, capacity=1, stay=1.0) for _ in range(50)]
    assert sum(rounds) <= 10, "of 300 callers, of whom one or two have no luck"
    rounds = [lost(callers=12, tries=5, capacity=2, stay=3.0) for _ in range(25)]  # longer than was presumed
    assert sum(rounds) <= 45, "of 300, some 14 as a rule"


def test_an_idle_hour_is_no_slow_departure() -> None:
    clock = Clock()
    slots = make(capacity=1, clock=clock, queued_requests=100)
    for _ in range(30):
        clock.now += 3600
        with take(slots):
            clock.now += 1
    for _ in range(5):
        take(slots)
    take(slots, deadline=clock.now + 0.1)


def test_an_hour_between_two_rushes_is_no_slow_departure() -> None:
    clock = Clock()
    slots = make(capacity=1, clock=clock, queued_requests=100)
    for _ in range(30):
        for slot in [take(slots), take(slots)]:  # somebody waits when the first leaves, and nobody when the second
            clock.now += 0.01
            with slot:
                pass
        clock.now += 3600
    for _ in range(5):
        take(slots)
    take(slots, deadline=clock.now + 0.1)


@pytest.mark.parametrize(("capacity", "most"), [(1, 1), (2, 1), (8, 4), (9, 4)])
def test_quiet_is_less_than_half(capacity: int, most: int) -> None:
    slots = make(capacity=capacity)
    for _ in range(most):
        assert slots.quiet
        take(slots)
    assert not slots.quiet


def test_a_full_house_grows_weary_of_looks_in_vain_and_rests() -> None:
    clock = Clock()
    slots = make(capacity=1, clock=clock, queued_requests=0)
    only = take(slots)
    for _ in range(64):
        assert not slots.many_misses
        with pytest.raises(Overloaded):
            take(slots)
    assert slots.many_misses
    for _ in range(100):
        with pytest.raises(Overloaded):
            slots.check(Priority.NORMAL, None)  # did not look
    clock.now += 0.25
    assert not slots.many_misses
    for _ in range(32):
        with pytest.raises(Overloaded):
            slots.check(Priority.NORMAL, None, after_lookup=True)
    assert slots.many_misses
    with only:
        pass
    assert not slots.many_misses  # there is room


def test_hints_are_few_whatever_the_queue_takes() -> None:
    """The status made of each is kept."""
    slots = make(capacity=1)
    hints = [slots.overloaded("", Reason.QUEUE_FULL, 10 ** random.uniform(-1, 2)).retry_after for _ in range(20_000)]
    assert len(set(hints)) < 500
    assert 0.1 <= min(hints) < max(hints) <= 60
    for queue_time in (0.2, 0.93, 3.7, 21.0, 60.0):
        hints = [retry_hint(queue_time) for _ in range(200)]
        assert 0.48 * queue_time < min(hints) < 0.6 * queue_time < 0.9 * queue_time < max(hints) < 1.02 * queue_time


def storm(slots: AdmissionSlots, tenant: str = "", count: int = 64) -> None:
    for _ in range(count):
        with pytest.raises(Overloaded):
            slots.check(Priority.BACKGROUND, None, tenant)


def test_in_a_storm_of_refusals_the_next_is_not_read_and_some_always_are() -> None:
    clock = Clock()
    slots = make(capacity=1, clock=clock, queued_requests=1)
    one, _ = take(slots), take(slots)
    storm(slots, count=31)
    assert not slots.stormed
    storm(slots, count=32)
    assert slots.stormed
    slots.check_unread("")  # the 64th is read
    storm(slots, count=1)
    for _ in range(1000):
        with pytest.raises(Overloaded) as caught:
            slots.check_unread("")
    assert caught.value.reason == "QUEUE_FULL"
    assert 0.1 <= caught.value.retry_after <= 60
    assert slots.refusals == {"QUEUE_FULL": 1064}
    clock.now += 1 / 128
    slots.check_unread("")  # another one is read
    storm(slots, count=1)
    with one:
        pass
    slots.check_unread("")  # there is room
    take(slots)
    clock.now += 0.5
    assert not slots.stormed


def test_what_others_would_make_room_for_is_read_in_a_storm() -> None:
    slots = make(capacity=1, queued_requests=4)
    for tenant in "aaaa":
        take_of(slots, tenant)
    background = take_of(slots, "a", Priority.BACKGROUND)
    storm(slots, "a", 99)
    slots.check_unread("b")  # has less waiting than the other tenant
    slots.check_unread("a")  # may be somebody for whom the background gives way
    background.start()
    with background:
        pass
    take_of(slots, "a")
    with pytest.raises(Overloaded):
        slots.check_unread("a")
    slots.check_unread("b")


def take_of(slots: AdmissionSlots, tenant: str, priority: Priority = Priority.NORMAL) -> AdmissionSlot:
    slot = slots.take(priority, 1, None, tenant)
    slot.on_evict(lambda error: slot.__exit__(None, None, None))
    return slot


class Hall(RuleBasedStateMachine):
    """Any order of taking, starting and leaving keeps the books straight, and no more get in than may."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.slots = AdmissionSlots(LimitOptions(queued_requests=3, queued_prompt_tokens=50), lambda: 2, self.clock)
        self.inside: list[AdmissionSlot] = []
        self.waiting: dict[int, int] = {}  # id of slot → prompt tokens, while it has no first token

    @rule(tokens=st.integers(1, 60), priority=st.sampled_from(Priority))
    def come(self, tokens: int, priority: Priority) -> None:
        held = sum(self.waiting.values())
        if len(self.inside) >= 5 or (held and held + tokens > 50):
            with pytest.raises(Overloaded):
                self.slots.take(priority, tokens, None)
            return
        slot = self.slots.take(priority, tokens, None)
        self.inside.append(slot)
        self.waiting[id(slot)] = tokens

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.inside))
        slot.start()
        self.waiting.pop(id(slot), None)

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), seconds=st.floats(0, 5))
    def leave(self, data: st.DataObject, seconds: float) -> None:
        self.clock.now += seconds
        slot = data.draw(st.sampled_from(self.inside))
        with slot:
            pass
        self.inside.remove(slot)
        self.waiting.pop(id(slot), None)

    @invariant()
    def books(self) -> None:
        assert self.slots.taken == len(self.inside) <= 5
        assert self.slots.waiting == len(self.waiting)

    def teardown(self) -> None:
        for slot in self.inside:
            slot.__exit__(None, None, None)
        for _ in range(5):  # every slot and every token is back
            self.slots.take(Priority.NORMAL, 10, None)


TestHall = Hall.TestCase
TestHall.settings = settings(max_examples=example_count(60), stateful_step_count=40, deadline=None)
