"""Waiting for a device, with and without other work."""

from __future__ import annotations

import pytest

from engine.execution import poller
from engine.execution.poller import IdleWork, RingPoller


def test_other_work_is_done_instead_of_a_nap(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(poller.time, "sleep", naps.append)
    pieces, meanwhile = iter([True, True, False]), IdleWork()
    waiting = RingPoller(nap=0.5, idle_work=meanwhile)
    waiting.wait()
    meanwhile.piece = lambda: next(pieces)
    assert naps == [0.5], "nothing else is to be done until somebody says what"
    for _ in range(3):
        waiting.wait()
    assert naps == [0.5, 0.5]
