"""What requests wait for a Redis that is sick, against what they wait for one that is well."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator

import pytest

from tests.service.core.answers.test_cache_sick import FAULTS, Sick, sick

__all__ = ["sick"]
BUDGET = 0.02  # seconds that a lookup may take


@contextlib.contextmanager
def sleeping() -> Iterator[list[float]]:
    """How long sleeps of one budget really take on this machine meanwhile."""
    slept, over = [], threading.Event()

    def sleep() -> None:
        while not over.is_set():
            begun = time.perf_counter()
            time.sleep(BUDGET)
            slept.append(time.perf_counter() - begun)

    thread = threading.Thread(target=sleep)
    thread.start()
    yield slept
    over.set()
    thread.join()


def test_none_waits_longer_for_a_redis_that_starts_late(sick: Sick) -> None:
    with sleeping() as slept:
        waited = sick.run(12)
    assert max(waited) < 10 * max(slept)
    sick.redis.start()


@pytest.mark.parametrize("name", FAULTS)
def test_most_find_the_breaker_open_and_none_waits_long(sick: Sick, name: str) -> None:
    sick.well()
    well = sick.run(20)
    with FAULTS[name](sick), sleeping() as slept:
        waited = sick.run(20)
    assert statistics.median(waited) < 10 * statistics.median(well)
    assert max(waited) < 10 * max(slept)


def test_none_waits_longer_for_an_emptied_redis(sick: Sick) -> None:
    sick.well()
    with sleeping() as slept:
        for _ in range(10):
            sick.redis.command("FLUSHALL")
            assert max(sick.run(2)) < 10 * max([BUDGET, *slept])
