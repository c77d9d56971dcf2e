"""The order in which a server leaves service, and how that is undone."""

from __future__ import annotations

import asyncio

import pytest

from service.config.settings import LimitOptions
from service.core.admission.admission import Admission
from service.core.errors import Draining, ShuttingDown
from service.core.operations.draining import Drain

LONG = 3600.0


def make(delay: float) -> tuple[Admission, Drain]:
    admission = Admission(LimitOptions(), lambda: 4)
    return admission, Drain(admission, delay)


async def test_without_a_delay_nothing_new_gets_in() -> None:
    admission, drain = make(0.0)
    assert not drain.begun
    ticket = admission.admit("t", "x", None)
    drain.begin()
    assert drain.begun
    assert not drain.admitting
    with pytest.raises(Draining):
        admission.admit("t", "y", None)
    waiting = asyncio.create_task(drain.over(None))
    await asyncio.sleep(0)
    assert await drain.over(0.01) == 1
    with ticket:
        pass
    assert await asyncio.wait_for(waiting, 60) == 0


async def test_in_the_delay_requests_are_admitted() -> None:
    admission, drain = make(LONG)
    drain.begin()
    with admission.admit("t", "x", None):
        assert (drain.begun, drain.admitting) == (True, True)
        assert await drain.over(0.01) == 1
    assert await drain.over(0.01) == 0, "nothing is live"
    assert drain.admitting, "and yet it is not drained"
    drain.refuse()
    assert await asyncio.wait_for(drain.over(None), 60) == 0
    with pytest.raises(Draining):
        admission.admit("t", "y", None)


async def test_the_delay_is_one_however_often_a_drain_begins() -> None:
    admission, drain = make(0.05)
    drain.begin()
    drain.begin(for_good=True)
    await asyncio.wait_for(drain.refused(), 60)
    drain.begin(for_good=True)
    assert not drain.admitting
    assert admission.draining


@pytest.mark.parametrize("delay", [0.0, LONG])
async def test_undone_it_is_as_before(delay: float) -> None:
    admission, drain = make(delay)
    drain.undo()
    for _ in range(2):
        drain.begin()
        with admission.admit("t", "x", None) if delay else pytest.raises(Draining):
            admission.admit("t", "z", None).__exit__(None, None, None)
        drain.undo()
        assert (drain.begun, drain.admitting) == (False, True)
        with admission.admit("t", "x", None):
            pass


async def test_who_waits_hears_that_it_was_undone() -> None:
    admission, drain = make(0.0)
    with admission.admit("t", "x", None):
        drain.begin()
        waiting = asyncio.create_task(drain.over(None))
        await asyncio.sleep(0)
        drain.undo()
        assert await asyncio.wait_for(waiting, 60) == 1
        assert drain.admitting


async def test_the_end_of_the_process_cannot_be_undone() -> None:
    _, drain = make(LONG)
    drain.begin()
    drain.begin(for_good=True)
    with pytest.raises(ShuttingDown):
        drain.undo()
    assert drain.begun
