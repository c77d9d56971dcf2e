"""The bound against scipy's Beta distribution, and what one caller can do to it: nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta

from cache.semantic.evidence import (
    CALLERS,
    MOST_CALLERS,
    Evidence,
    chance_above,
    counted,
    proven,
    refuted,
    unpack_evidence,
)
from tests.properties import example_count

BOUND = (0.01, 0.95)


@given(st.integers(0, 5000), st.integers(0, 60), st.floats(0.001, 0.3))
@settings(max_examples=example_count(200), deadline=None)
def test_the_chance_is_that_of_a_beta(right: int, wrong: int, error: float) -> None:
    expected = beta(right + 1, wrong + 1).cdf(1 - error)
    assert chance_above(right, wrong, error) == pytest.approx(expected, abs=1e-9, rel=1e-6)


def evidence(right: int, wrong: int = 0) -> Evidence:
    """As even among the least number of callers as can be."""
    each, more = divmod(right, CALLERS)
    return Evidence({bytes([caller]): each + (caller < more) for caller in range(CALLERS)}, wrong)


def test_300_right_ones_of_four_callers_prove_one_percent_and_296_do_not() -> None:
    assert not proven(evidence(296), *BOUND)
    assert not proven(evidence(299), *BOUND)  # the fewest of a caller count four times: 296
    assert proven(evidence(300), *BOUND)
    assert not proven(Evidence(), *BOUND)


def test_wrong_ones_ask_for_more() -> None:
    assert not proven(evidence(400, 1), *BOUND)
    assert proven(evidence(472, 1), *BOUND)
    assert not proven(evidence(1000, 100), *BOUND)


def test_one_caller_proves_nothing_however_long_it_asks() -> None:
    assert not proven(Evidence({b"a": 1_000_000}), *BOUND)
    assert not proven(Evidence({b"a": 1_000_000, b"b": 1_000_000, b"c": 1_000_000}), *BOUND)
    assert not proven(Evidence({b"a": 1_000_000, b"b": 24, b"c": 24, b"d": 24}), *BOUND)
    assert proven(Evidence({b"a": 1_000_000, b"b": 75, b"c": 75, b"d": 75}), *BOUND)


@given(st.lists(st.integers(0, 300), max_size=8))
def test_no_share_counts_for_more_than_its_part(shares: list[int]) -> None:
    def holds(total: int) -> bool:
        return sum(min(share * CALLERS, total) for share in shares) >= total * CALLERS

    total = counted(shares)
    assert holds(total)
    assert not any(holds(more) for more in range(total + 1, sum(shares) + 2))


def test_refuted_once_it_is_probably_broken() -> None:
    assert not refuted(Evidence(), *BOUND)
    assert refuted(evidence(0, 1), *BOUND)
    assert not refuted(evidence(200, 1), *BOUND)
    assert refuted(evidence(200, 20), *BOUND)
    assert refuted(evidence(10, 10_000), *BOUND)


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=2), st.booleans()), max_size=80))
def test_a_value_is_bounded_and_read_as_it_was_written(seen: list[tuple[bytes, bool]]) -> None:
    found = Evidence()
    for caller, right in seen:
        found = found.with_one(caller, right)
    assert len(found.right) <= MOST_CALLERS
    assert found.wrong == sum(not right for _, right in seen)
    assert unpack_evidence(found.packed()) == found


@given(st.binary(max_size=60))
def test_other_bytes_are_nothing(data: bytes) -> None:
    found = unpack_evidence(data)
    assert found is None or (found.wrong >= 0 and min(found.right.values(), default=0) >= 0)


@pytest.mark.parametrize("broken", [b"", b"\x93\x02\x00\x80", b"\x93\x01\xff\x80", b"\x93\x01\x00\x81\xc4\x01a\xff"])
def test_another_schema_and_numbers_below_zero_are_nothing(broken: bytes) -> None:
    assert unpack_evidence(broken) is None
