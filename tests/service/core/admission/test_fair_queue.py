"""Tenants take turns in the queue; within one, and among priorities, rank decides."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import AGING, Priority
from service.config.settings import LimitOptions
from service.core.admission.admission_slots import AdmissionSlot, AdmissionSlots
from service.core.admission.fair_queue import FairQueue, Waiting
from service.core.errors import Overloaded

NORMAL = Priority.NORMAL


class Line:
    """Who waits, as the engine orders them."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.all: list[Waiting] = []
        self.now = 100.0

    def come(self, tenant: str, priority: Priority = NORMAL, tokens: int = 1) -> Waiting:
        self.now += 0.001
        one = Waiting(tenant, priority, tokens)
        self.queue.add(one, self.now)
        self.all.append(one)
        return one

    def served(self) -> Waiting:
        one = min(self.all, key=lambda one: one.rank)  # the earlier of two: by key, in the engine
        self.all.remove(one)
        self.queue.remove(one)
        return one

    def order(self) -> str:
        return "".join(self.served().tenant for _ in range(len(self.all)))


def test_one_tenant_alone_is_served_by_rank() -> None:
    line = Line()
    ones = [line.come("a", priority) for priority in [*Priority] * 20]
    assert all(one.forward == 0 for one in ones)


@pytest.mark.parametrize(
    ("arrivals", "order"),
    [
        ("aaaaaab", "abaaaaa"),
        ("aaaaaabbb", "abababaaa"),
        ("aaaabbbbcccc", "abcabcabcabc"),
        ("ababab", "ababab"),
        ("aaaabc", "abcaaa"),
        ("aaabbbbbb", "abababbbb"),
        ("abcdaaaa", "abcdaaaa"),
    ],
)
def test_tenants_take_turns(arrivals: str, order: str) -> None:
    line = Line()
    for tenant in arrivals:
        line.come(tenant)
    assert line.order() == order


def test_who_asks_for_one_thing_after_the_other_does_not_overtake_for_ever() -> None:
    """Three such callers could keep one slot busy without the fourth, who has much waiting."""
    line = Line()
    for _ in range(100):
        line.come("a")
    for tenant in "bcd":
        line.come(tenant)
    served = []
    for _ in range(200):
        served.append(line.served().tenant)
        line.come(served[-1])
    assert Counter(served) == dict.fromkeys("abcd", 50)


def test_a_higher_priority_is_not_overtaken() -> None:
    line = Line()
    for _ in range(5):
        line.come("a", Priority.INTERACTIVE)
    line.come("a", Priority.BACKGROUND)
    line.come("b", NORMAL)
    assert line.order() == "aaaaaba"


def test_within_a_tenant_order_is_kept() -> None:
    line = Line()
    for tenant in "aaaaaaaabbbb":
        line.come(tenant)
    mine = [one for one in line.all if one.tenant == "b"]
    assert [one for one in (line.served() for _ in range(12)) if one.tenant == "b"] == mine


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(Priority), st.booleans()), max_size=60))
def test_nothing_is_lost_and_nobody_is_put_back(events: list[tuple[str, Priority, bool]]) -> None:
    line = Line()
    for tenant, priority, serve in events:
        one = line.come(tenant, priority)
        assert one.forward >= 0
        assert one.rank == pytest.approx(line.now - AGING * priority - one.forward)
        if serve:
            line.served()
        assert len(line.queue) == len(line.all)
        assert line.queue.tokens == len(line.all)
        for who in "abc":
            ahead = line.queue.ahead(who, Priority.BACKGROUND)
            assert sum(one.tenant == who for one in line.all) <= ahead <= len(line.all)


# Where there is no room


class Hall:
    """Slots whose holders note that they had to go."""

    def __init__(self, **limits: int) -> None:
        self.slots = AdmissionSlots(LimitOptions(**limits), lambda: 1, lambda: 100.0)
        self.gone: list[str] = []

    def take(self, tenant: str, priority: Priority = NORMAL, tokens: int = 1) -> AdmissionSlot:
        slot = self.slots.take(priority, tokens, None, tenant)

        def go(error: Overloaded) -> None:
            self.gone.append(f"{tenant} {error.reason}")
            slot.__exit__(None, None, None)

        slot.on_evict(go)
        return slot

    def refused(self, tenant: str, priority: Priority = NORMAL, tokens: int = 1) -> str:
        with pytest.raises(Overloaded) as caught:
            self.take(tenant, priority, tokens)
        return caught.value.reason


def test_a_tenants_own_background_gives_way_to_what_is_more_urgent() -> None:
    hall = Hall(queued_requests=3)
    hall.take("a").start()
    hall.take("a")
    for _ in range(2):
        hall.take("a", Priority.BACKGROUND)
    assert hall.refused("a", Priority.BACKGROUND) == "QUEUE_FULL"
    hall.take("a", Priority.INTERACTIVE)
    hall.take("a", NORMAL)
    assert hall.gone == ["a QUEUE_FULL"] * 2
    assert hall.refused("a", Priority.INTERACTIVE) == "QUEUE_FULL"
    assert hall.slots.taken == 4


def test_who_has_most_waiting_gives_way() -> None:
    hall = Hall(queued_requests=4)
    for _ in range(5):
        hall.take("a")
    assert hall.refused("a") == "QUEUE_FULL"
    hall.slots.check(NORMAL, None, "b")
    hall.take("b")
    hall.take("b")
    assert hall.gone == ["a QUEUE_FULL"] * 2
    assert hall.refused("b") == "QUEUE_FULL", "3 and 2: another would be as unfair as this"
    assert hall.slots.taken == hall.slots.waiting == 5
    assert hall.slots.refusals == {"QUEUE_FULL": 4}


def test_who_runs_or_has_a_higher_priority_does_not_give_way() -> None:
    hall = Hall(queued_requests=4)
    for _ in range(5):
        hall.take("a", Priority.INTERACTIVE)
    assert hall.refused("b") == "QUEUE_FULL"
    assert hall.gone == []
    hall = Hall(queued_requests=4)
    for _ in range(5):
        hall.take("a").start()
    assert hall.refused("b") == "QUEUE_FULL"


def test_the_last_of_the_lowest_priority_gives_way() -> None:
    hall = Hall(queued_requests=2)
    first, second, third = hall.take("a"), hall.take("a", Priority.BACKGROUND), hall.take("a")
    hall.take("b")
    assert (first.given_back, second.given_back, third.given_back) == (False, True, False)


def test_prompt_tokens_of_one_tenant_shut_nobody_out() -> None:
    hall = Hall(queued_prompt_tokens=100)
    for _ in range(4):
        hall.take("a", tokens=25)
    assert hall.refused("a", tokens=25) == "QUEUED_TOKENS"
    hall.take("b", tokens=40)
    assert hall.gone == ["a QUEUED_TOKENS"] * 2
    assert hall.refused("b", tokens=90) == "QUEUED_TOKENS"
    assert hall.slots.taken == 3
