from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache.api import BreakerSettings, BreakerState
from cache.store.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(BreakerSettings(), clock)
    for _ in range(3):
        assert breaker.allow()
        breaker.failed()
    return breaker


def test_three_failures_within_a_second_open_it() -> None:
    clock = Clock()
    breaker = opened(clock)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allow()


def test_three_failures_over_longer_do_not() -> None:
    clock = Clock()
    breaker = Breaker(BreakerSettings(), clock)
    for _ in range(20):
        breaker.failed()
        clock.now += 0.6
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allow()


def test_one_probe_after_the_pause_and_only_one() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now = 0.99
    assert not breaker.allow()
    clock.now = 1.0
    assert [breaker.allow() for _ in range(5)] == [True, False, False, False, False]


def test_a_probe_that_succeeds_closes_and_one_that_fails_opens_again() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now = 1.0
    assert breaker.allow()
    breaker.failed()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allow()
    clock.now = 2.0
    assert breaker.allow()
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert all(breaker.allow() for _ in range(5))


def test_a_probe_that_never_reports_is_followed_by_another() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now = 1.0
    assert breaker.allow()
    clock.now = 2.5
    assert breaker.allow()


def test_it_says_beforehand_what_it_would_say() -> None:
    clock = Clock()
    assert not Breaker(BreakerSettings(), clock).waiting
    breaker = opened(clock)
    assert breaker.waiting
    clock.now = 1.0
    assert not breaker.waiting
    assert breaker.allow()  # looking took no probe
    assert breaker.waiting
    breaker.succeeded()
    assert not breaker.waiting


def test_a_straggler_from_before_does_not_close_it() -> None:
    clock = Clock()
    breaker = opened(clock)
    breaker.succeeded()
    assert not breaker.allow()


@given(st.lists(st.one_of(st.sampled_from(["ok", "fail"]), st.floats(0.01, 3)), max_size=80))
def test_never_asks_more_than_once_a_pause_while_failing(steps: list[str | float]) -> None:
    """With a server that only fails, calls let through stay bounded by time, whatever the order of events."""
    clock = Clock()
    breaker = Breaker(BreakerSettings(), clock)
    let_through = 0
    for step in steps:
        if isinstance(step, float):
            clock.now += step
        elif breaker.allow():
            let_through += 1
            breaker.failed()
    # Three in any window of a second while closed, then one a second.
    assert let_through <= 3 * (clock.now + 1)
