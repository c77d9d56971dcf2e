"""Who gets in: names, quotas, drain, a bound on all; and that whoever leaves gives back what he had."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.api import TokenEvents
from engine.errors import Aborted, DeadlineExceeded
from service.config.settings import LimitOptions
from service.core.admission.admission import Admission, Ticket
from service.core.errors import Draining, DuplicateRequest, Overloaded, UnknownRequest
from tests.properties import example_count


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """A stream that only remembers why it was aborted."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def __aiter__(self) -> Recorder:
        return self

    async def __anext__(self) -> TokenEvents:
        raise StopAsyncIteration

    def batch(self, tokens: int, delay: float) -> None: ...

    def cancel(self) -> None: ...

    def abort(self, reason: str) -> None:
        self.reason = reason


def make(capacity: int = 2, clock: Clock | None = None, **limits: Any) -> Admission:
    return Admission(LimitOptions(**limits), lambda: capacity, clock or Clock())


def admit(admission: Admission, name: str, tenant: str = "t", **options: Any) -> Ticket:
    return admission.admit(tenant, name, options.get("deadline"))


def test_no_more_are_live_than_may_be() -> None:
    admission = make(capacity=2, queued_requests=1, live_requests=4)
    tickets = [admit(admission, str(n)) for n in range(4)]
    with pytest.raises(Overloaded) as caught:
        admit(admission, "4")
    assert caught.value.reason == "LIVE_REQUESTS"
    assert 0.1 <= caught.value.retry_after <= 60
    with tickets[0]:
        pass
    admit(admission, "4")
    assert admission.slots.refusals == {"LIVE_REQUESTS": 1}


def test_who_is_over_a_bound_is_told_when_one_of_those_within_it_will_have_gone() -> None:
    clock = Clock()
    admission = make(clock=clock, tenant_requests=4)
    for _ in range(20):
        with admit(admission, "before"):
            clock.now += 8.0
    for name in range(4):
        admit(admission, str(name))
    for _ in range(50):
        with pytest.raises(Overloaded) as caught:
            admit(admission, "one more")
        assert 1.0 <= caught.value.retry_after <= 2.0  # four leave in eight seconds


@pytest.mark.parametrize(("queued", "most"), [(0, 512), (600, 602)])
def test_no_more_look_at_once_than_may(queued: int, most: int) -> None:
    admission = make(capacity=2, queued_requests=queued)
    tickets = [admit(admission, str(n)) for n in range(most)]
    with pytest.raises(Overloaded):
        admit(admission, "one more")
    tickets[0].lookup_ended()
    tickets[0].lookup_ended()
    tickets.append(admit(admission, "in his stead"))
    with pytest.raises(Overloaded):
        admit(admission, "one more")
    for ticket in tickets:
        with ticket:
            pass
    assert (admission.in_lookup, admission.live) == (0, 0)


def test_names_belong_to_a_tenant_and_are_free_after_the_end() -> None:
    admission = make(capacity=9)
    one = admit(admission, "name", "a")
    admit(admission, "name", "b")
    with pytest.raises(DuplicateRequest):
        admit(admission, "name", "a")
    with one:
        pass
    admit(admission, "name", "a")


def test_a_tenants_quota_is_its_own() -> None:
    admission = make(capacity=9, tenant_requests=1)
    admit(admission, "1", "a")
    with pytest.raises(Overloaded) as caught:
        admit(admission, "2", "a")
    assert caught.value.reason == "TENANT_QUOTA"
    admit(admission, "2", "b")


def test_a_deadline_that_has_passed() -> None:
    clock = Clock()
    admission = make(clock=clock)
    for deadline in (99.0, 100.0):
        with pytest.raises(DeadlineExceeded):
            admit(admission, "late", deadline=deadline)
    assert admission.live == 0
    admit(admission, "early", deadline=100.001)


def test_an_abort_reaches_the_stream_even_before_there_is_one() -> None:
    admission = make()
    ticket, stream = admit(admission, "x"), Recorder()
    ticket.attach(stream)
    admission.abort("t", "x", "because")
    assert stream.reason == "because"
    early = admit(admission, "y")
    admission.abort("t", "y", "too soon")
    with pytest.raises(Aborted, match="too soon"):
        early.attach(Recorder())
    for tenant, name in (("t", "z"), ("u", "x")):
        with pytest.raises(UnknownRequest):
            admission.abort(tenant, name, "because")


async def test_drain() -> None:
    admission = make()
    assert await admission.idle(0.0) == 0
    ticket = admit(admission, "x")
    admission.drain()
    with pytest.raises(Draining):
        admit(admission, "y")
    assert await admission.idle(0.01) == 1
    waiting = asyncio.create_task(admission.idle(None))
    await asyncio.sleep(0)
    assert not waiting.done()
    with ticket:
        pass
    assert await asyncio.wait_for(waiting, 60) == 0


class Door(RuleBasedStateMachine):
    """Any order of coming, looking and leaving keeps the books straight."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.limits = LimitOptions(queued_requests=3, live_requests=5, tenant_requests=4)
        self.admission = Admission(self.limits, lambda: 2, self.clock)
        self.inside: list[Ticket] = []
        self.in_lookup: set[int] = set()

    @rule(tenant=st.sampled_from("ab"), name=st.integers(0, 5))
    def come(self, tenant: str, name: int) -> None:
        taken = any((t.tenant, t.request_id) == (tenant, str(name)) for t in self.inside)
        full = len(self.inside) >= 5
        quota = sum(t.tenant == tenant for t in self.inside) >= 4
        expected = DuplicateRequest if taken else Overloaded if quota or full else None
        if expected is not None:
            with pytest.raises(expected):
                self.admission.admit(tenant, str(name), None)
            return
        ticket = self.admission.admit(tenant, str(name), None)
        self.inside.append(ticket)
        self.in_lookup.add(id(ticket))

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def looked(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.inside))
        ticket.lookup_ended()
        self.in_lookup.discard(id(ticket))

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.inside))
        with ticket:
            pass
        self.inside.remove(ticket)
        self.in_lookup.discard(id(ticket))

    @invariant()
    def books(self) -> None:
        assert self.admission.live == len(self.inside)
        assert self.admission.in_lookup == len(self.in_lookup)

    def teardown(self) -> None:
        for ticket in self.inside:
            ticket.__exit__(None, None, None)
        for number in range(5):  # every line is free again
            self.admission.admit("cd"[number % 2], str(number), None)


TestDoor = Door.TestCase
TestDoor.settings = settings(max_examples=example_count(60), stateful_step_count=40, deadline=None)
