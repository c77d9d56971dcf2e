"""The table of those who may have killed an engine process."""

from __future__ import annotations

import logging

import pytest
from msgspec.structs import replace

from engine.api import GenerationRequest
from engine.client.suspects import NO_SOLO, Suspects
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
    suspects = Suspects()
    assert suspects.solo(ONE) == NO_SOLO
    suspects.died_alone(ONE, 5, ahead=2)
    assert suspects.solo(ONE) == (3, 8)
    suspects.died_alone(ONE, 5, ahead=2)
    with pytest.raises(Quarantined):
        suspects.solo(ONE)
    assert suspects.solo(OTHER) == NO_SOLO
    assert suspects.quarantines == 1


def test_any_number_of_deaths_in_company_are_not() -> None:
    suspects = Suspects()
    for made in (9, 0, 4):
        suspects.died_together([(ONE, made), (OTHER, 0)], ahead=1)
    assert suspects.solo(ONE) == (0, 11), "wherever it may have been the cause it runs alone"
    assert suspects.solo(OTHER) == (0, 2)
    assert suspects.quarantines == 0


def test_a_retry_has_another_seed_and_is_known_all_the_same() -> None:
    suspects = Suspects()
    suspects.died_together([(sampled(ONE, seed=1), 0)], ahead=1)
    assert suspects.solo(sampled(ONE, seed=2)) != NO_SOLO
    assert suspects.solo(sampled(ONE, temperature=0.5)) == NO_SOLO
    assert suspects.solo(replace(ONE, logprobs=1)) == NO_SOLO


def test_who_runs_to_the_end_is_forgotten() -> None:
    suspects = Suspects()
    suspects.ended(ONE)
    suspects.died_together([(ONE, 0), (OTHER, 0)], ahead=1)
    suspects.ended(ONE)
    assert suspects.solo(ONE) == NO_SOLO
    assert suspects.solo(OTHER) != NO_SOLO


def test_nothing_is_kept_for_ever_nor_without_bound() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    for _ in range(2):
        suspects.died_alone(ONE, 0, ahead=1)
    suspects.died_together([(plain_request((number, 5)), 0) for number in range(4095)], ahead=1)
    with pytest.raises(Quarantined):
        suspects.solo(ONE)
    suspects.died_together([(OTHER, 0)], ahead=1)
    assert len(suspects) == 4096
    assert suspects.solo(ONE) == NO_SOLO
    clock.now += 3600
    assert suspects.solo(OTHER) == NO_SOLO
    assert len(suspects) == 0


def test_the_log_has_a_hash_that_only_this_process_can_make(caplog: pytest.LogCaptureFixture) -> None:
    lines = set()
    for _ in range(2):
        suspects = Suspects()
        with caplog.at_level(logging.ERROR):
            for _ in range(2):
                suspects.died_alone(ONE, 0, ahead=1)
        lines.add(caplog.records[-1].getMessage())
    assert len(lines) == 2
