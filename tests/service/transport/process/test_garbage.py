"""When a process looks for garbage that refers to itself."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable

import pytest

from service.transport.process import garbage
from service.transport.process.garbage import Garbage


class Cycle:
    """Goes when somebody looks for it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[int], weakref.ref[Cycle]]]:
    """Makes a cycle in a process that so many wait for, which looks whether it is time a hundred times a second."""
    monkeypatch.setattr(garbage, "_EVERY", 0.01)
    monkeypatch.setattr(garbage, "_SOME", 0)
    before = gc.get_freeze_count()
    watch = Garbage()
    assert not gc.isenabled()
    assert gc.get_freeze_count() > before
    live = 0
    task = asyncio.create_task(watch.run(lambda: live))

    def make(waiting: int) -> weakref.ref[Cycle]:
        nonlocal live
        live = waiting
        return weakref.ref(Cycle())

    yield make
    task.cancel()
    gc.enable()
    gc.unfreeze()


Make = Callable[[int], weakref.ref[Cycle]]


async def collected(cycle: weakref.ref[Cycle], within: float) -> bool:
    try:
        async with asyncio.timeout(within):
            while cycle() is not None:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.005)
    except TimeoutError:
        return False
    return True


@pytest.mark.proof
async def test_it_goes_when_nobody_waits_and_not_before(watched: Make) -> None:
    cycle = watched(1)
    assert not await collected(cycle, 0.2)
    watched(0)
    assert await collected(cycle, 60)


@pytest.mark.product
async def test_it_goes_when_much_has_come(watched: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cycle = watched(1)
    monkeypatch.setattr(garbage, "resident", lambda: 1 << 40)
    assert await collected(cycle, 60)
    assert not await collected(watched(1), 0.2)  # no more has come since


async def test_it_goes_when_many_objects_were_made_however_many_wait(
    watched: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC makes three objects for each call that refer to each other: of a flood they would be gigabytes."""
    monkeypatch.setattr(garbage, "resident", lambda: 0)
    monkeypatch.setattr(garbage, "_MANY", 100)
    cycle = watched(1)
    made = [Cycle() for _ in range(200)]
    assert await collected(cycle, 60)
    assert len(made) == 200


async def test_it_goes_after_a_while_however_many_wait(watched: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cycle = watched(1)
    monkeypatch.setattr(garbage, "_LONGEST", 0.05)
    assert await collected(cycle, 60)
