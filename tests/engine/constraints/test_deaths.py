"""Deaths by constraints: how many are too many, and for how long."""

from __future__ import annotations

from engine.constraints.budget import MOST_DEATHS, REFUSED_FOR
from engine.constraints.deaths import Deaths


def test_refusals_end_and_counting_begins_anew() -> None:
    now = 0.0
    deaths = Deaths(lambda: now)
    for count in range(1, MOST_DEATHS + 1):
        assert not deaths.refused(b"a")
        assert deaths.add(b"a") == count
    assert deaths.refused(b"a")
    assert not deaths.refused(b"b")
    now += REFUSED_FOR - 1
    assert deaths.refused(b"a")
    now += 1
    assert not deaths.refused(b"a")
    assert deaths.add(b"a") == 1  # one more death does not refuse it again
    assert not deaths.refused(b"a")


def test_deaths_that_lie_far_apart_are_no_habit() -> None:
    now = 0.0
    deaths = Deaths(lambda: now)
    for _ in range(2 * MOST_DEATHS):
        assert deaths.add(b"a") == 1
        now += REFUSED_FOR
        assert not deaths.refused(b"a")
