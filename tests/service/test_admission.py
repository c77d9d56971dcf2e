"""Who gets in: limits, names, deadlines, drain; and that whoever leaves gives back what he had."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.api import Priority, TokenEvents
from engine.errors import Aborted, DeadlineExceeded
from service.admission import Admission, Ticket
from service.errors import Draining, DuplicateRequest, Overloaded, UnknownRequest
from service.settings import LimitOptions


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
    return admission.admit(tenant, name, options.get("priority", Priority.NORMAL), options.get("deadline"))


def test_as_many_as_run_and_wait() -> None:
    admission = make(capacity=2, queued_requests=1)
    tickets = [admit(admission, str(n)) for n in range(3)]
    with pytest.raises(Overloaded) as caught:
        admit(admission, "3")
    assert caught.value.reason == "QUEUE_FULL"
    assert 0.1 <= caught.value.retry_after <= 15
    with tickets[0]:
        pass
    admit(admission, "3")


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


def test_prompt_tokens_count_until_the_first_token() -> None:
    admission = make(capacity=9, queued_prompt_tokens=100)
    first, second, third = (admit(admission, str(n)) for n in range(3))
    first.count_prompt(1000)  # alone, so never too long
    with pytest.raises(Overloaded) as caught:
        second.count_prompt(1)
    assert caught.value.reason == "QUEUED_TOKENS"
    first.start()
    first.start()
    second.count_prompt(60)
    with pytest.raises(Overloaded):
        third.count_prompt(50)
    with second:
        pass
    third.count_prompt(50)


def test_a_deadline_that_has_passed() -> None:
    clock = Clock()
    admission = make(clock=clock)
    for deadline in (99.0, 100.0):
        with pytest.raises(DeadlineExceeded):
            admit(admission, "late", deadline=deadline)
    assert admission.live == 0
    admit(admission, "early", deadline=100.001)


def test_a_deadline_that_the_queue_cannot_meet() -> None:
    clock = Clock()
    admission = make(capacity=1, clock=clock)
    tickets = [admit(admission, str(n)) for n in range(20)]
    admit(admission, "before anything is known", deadline=100.5).__exit__(None, None, None)
    for ticket in tickets[:10]:
        clock.now += 1.0
        ticket.__exit__(None, None, None)  # one leaves a second
    admit(admission, "patient", deadline=clock.now + 30)
    with pytest.raises(DeadlineExceeded, match="cannot be met"):
        admit(admission, "hurried", deadline=clock.now + 5)
    admit(admission, "overtakes", deadline=clock.now + 5, priority=Priority.INTERACTIVE)
    with pytest.raises(Overloaded) as caught:
        make_full(admission)
    assert 1.0 <= caught.value.retry_after <= 1.5  # about when the next place is free


def make_full(admission: Admission) -> None:
    for number in range(1000):
        admit(admission, f"filler {number}")


def test_an_idle_hour_is_no_slow_departure() -> None:
    clock = Clock()
    admission = make(capacity=1, clock=clock, queued_requests=100)
    for hour in range(30):
        clock.now += 3600
        with admit(admission, f"lone {hour}"):
            clock.now += 1
    for number in range(5):
        admit(admission, str(number))
    admit(admission, "soon", deadline=clock.now + 0.1)


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
    assert await asyncio.wait_for(waiting, 1) == 0


class Door(RuleBasedStateMachine):
    """Any order of coming, counting, starting and leaving keeps the books straight."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.limits = LimitOptions(queued_requests=3, queued_prompt_tokens=50, tenant_requests=4)
        self.admission = Admission(self.limits, lambda: 2, self.clock)
        self.inside: list[Ticket] = []
        self.waiting: dict[int, int] = {}  # id of ticket → prompt tokens, while it has no first token

    @rule(tenant=st.sampled_from("ab"), name=st.integers(0, 5), priority=st.sampled_from(Priority))
    def come(self, tenant: str, name: int, priority: Priority) -> None:
        taken = any((t.tenant, t.request_id) == (tenant, str(name)) for t in self.inside)
        full = len(self.inside) >= 5
        quota = sum(t.tenant == tenant for t in self.inside) >= 4
        expected = DuplicateRequest if taken else Overloaded if quota or full else None
        if expected is not None:
            with pytest.raises(expected):
                self.admission.admit(tenant, str(name), priority, None)
            return
        ticket = self.admission.admit(tenant, str(name), priority, None)
        self.inside.append(ticket)
        self.waiting[id(ticket)] = 0

    @precondition(lambda self: any(not t.started and not t.prompt_tokens for t in self.inside))
    @rule(tokens=st.integers(1, 60), data=st.data())
    def count(self, tokens: int, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from([t for t in self.inside if not t.started and not t.prompt_tokens]))
        held = sum(self.waiting.values())
        if held and held + tokens > 50:
            with pytest.raises(Overloaded):
                ticket.count_prompt(tokens)
            return
        ticket.count_prompt(tokens)
        self.waiting[id(ticket)] = tokens

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.inside))
        ticket.start()
        self.waiting.pop(id(ticket), None)

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), seconds=st.floats(0, 5))
    def leave(self, data: st.DataObject, seconds: float) -> None:
        self.clock.now += seconds
        ticket = data.draw(st.sampled_from(self.inside))
        with ticket:
            pass
        self.inside.remove(ticket)
        self.waiting.pop(id(ticket), None)

    @invariant()
    def books(self) -> None:
        assert self.admission.live == len(self.inside)

    def teardown(self) -> None:
        for ticket in self.inside:
            ticket.__exit__(None, None, None)
        for number in range(5):  # every place and every token is back
            self.admission.admit("cd"[number % 2], str(number), Priority.NORMAL, None).count_prompt(10)


TestDoor = Door.TestCase
TestDoor.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
