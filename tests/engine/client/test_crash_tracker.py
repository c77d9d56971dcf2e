"""The table of those who may have killed an engine process."""

from __future__ import annotations

import logging

import pytest
from msgspec.structs import replace

from engine.api import GenerationRequest
from engine.client.crash_tracker import NO_SOLO, CrashTracker
from engine.errors import Quarantined
from engine.fake import plain_request


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def sampled(request: GenerationRequest, **changes: object) -> GenerationRequest:
    return replace(request, sampling=replace(request.sampling, **changes))  # type: ignore[arg-type]


ONE, OTHER = plain_request((1, 2, 3)), plain_request((1, 2, 4))


def test_two_deaths_alone_are_the_end_and_one_is_not() -> None:
    tracker = CrashTracker()
    assert tracker.solo(ONE) == NO_SOLO
    tracker.died_alone(ONE, 5, ahead=2)
    assert tracker.solo(ONE) == (3, 8)
    tracker.died_alone(ONE, 5, ahead=2)
    with pytest.raises(Quarantined):
        tracker.solo(ONE)
    assert tracker.solo(OTHER) == NO_SOLO
    assert tracker.quarantines == 1


def test_any_number_of_deaths_in_company_are_not() -> None:
    tracker = CrashTracker()
    for made in (9, 0, 4):
        tracker.died_together([(ONE, made), (OTHER, 0)], ahead=1)
    assert tracker.solo(ONE) == (0, 11), "wherever it may have been the cause it runs alone"
    assert tracker.solo(OTHER) == (0, 2)
    assert tracker.quarantines == 0


def test_a_retry_has_another_seed_and_is_known_all_the_same() -> None:
    tracker = CrashTracker()
    tracker.died_together([(sampled(ONE, seed=1), 0)], ahead=1)
    assert tracker.solo(sampled(ONE, seed=2)) != NO_SOLO
    assert tracker.solo(sampled(ONE, temperature=0.5)) == NO_SOLO
    assert tracker.solo(replace(ONE, logprobs=1)) == NO_SOLO


def test_who_runs_to_the_end_is_forgotten() -> None:
    tracker = CrashTracker()
    tracker.ended(ONE)
    tracker.died_together([(ONE, 0), (OTHER, 0)], ahead=1)
    tracker.ended(ONE)
    assert tracker.solo(ONE) == NO_SOLO
    assert tracker.solo(OTHER) != NO_SOLO


def test_nothing_is_kept_for_ever_nor_without_bound() -> None:
    clock = Clock()
    tracker = CrashTracker(clock)
    for _ in range(2):
        tracker.died_alone(ONE, 0, ahead=1)
    tracker.died_together([(plain_request((number, 5)), 0) for number in range(4095)], ahead=1)
    with pytest.raises(Quarantined):
        tracker.solo(ONE)
    tracker.died_together([(OTHER, 0)], ahead=1)
    assert len(tracker) == 4096
    assert tracker.solo(ONE) == NO_SOLO
    clock.now += 3600
    assert tracker.solo(OTHER) == NO_SOLO
    assert len(tracker) == 0


def test_the_log_has_a_hash_that_only_this_process_can_make(caplog: pytest.LogCaptureFixture) -> None:
    lines = set()
    for _ in range(2):
        tracker = CrashTracker()
        with caplog.at_level(logging.ERROR):
            for _ in range(2):
                tracker.died_alone(ONE, 0, ahead=1)
        lines.add(caplog.records[-1].getMessage())
    assert len(lines) == 2
