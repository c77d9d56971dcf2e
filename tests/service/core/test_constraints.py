"""Constraints as the front has them made: what kills the process that checks them is not tried for ever."""

from __future__ import annotations

from typing import Any

import pytest

from engine.constraints.budget import MOST_DEATHS, REFUSED_FOR
from service.core.constraints import ConstraintReader
from service.core.errors import InvalidRequest
from service.core.request import ConstraintText
from service.core.text.sandbox.processes import JobDied


class Deadly:
    """Every job kills its process."""

    def __init__(self) -> None:
        self.tried = 0

    async def run(self, kind: str, payload: bytes, deadline: float | None = None, sender: str = "") -> bytes:
        self.tried += 1
        if b"deadly" in payload:
            raise JobDied("a text process ended with -11")
        return b"start: /x/"


class Caller:
    """As much of an Origin as is looked at."""

    deadline = None

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant


async def test_what_kills_the_process_that_checks_it_is_tried_twice() -> None:
    now, processes = 0.0, Deadly()
    made: Any = ConstraintReader(processes, lambda: now)  # type: ignore[arg-type]
    deadly, sound = (ConstraintText("regex", (text,), "constraint.regex") for text in ("deadly", "x"))
    mallory, alice = Caller("mallory"), Caller("alice")
    for tries in (1, 2, 2, 2):
        with pytest.raises(InvalidRequest) as refused:
            await made.read(deadly, mallory)
        assert [one.field for one in refused.value.violations] == ["constraint.regex"]
        assert processes.tried == tries
    assert MOST_DEATHS == 2
    with pytest.raises(InvalidRequest):
        await made.read(deadly, alice)
    assert processes.tried == 3
    now += REFUSED_FOR
    with pytest.raises(InvalidRequest):
        await made.read(deadly, mallory)
    assert processes.tried == 4
    for caller in (mallory, alice):
        found = await made.read(sound, caller)
        assert (found.grammar, found.owner) == ("start: /x/", caller.tenant)
    assert processes.tried == 5
