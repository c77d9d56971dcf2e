"""The bound against scipy's Beta distribution."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta

from cache.semantic.evidence import bucket, chance_above, label, proven, refuted, wrongs


@given(st.integers(0, 5000), st.integers(0, 60), st.floats(0.001, 0.3))
@settings(max_examples=200, deadline=None)
def test_the_chance_is_that_of_a_beta(right: int, wrong: int, error: float) -> None:
    expected = beta(right + 1, wrong + 1).cdf(1 - error)
    assert chance_above(right, wrong, error) == pytest.approx(expected, abs=1e-9, rel=1e-6)


def counts(right: int, wrong: int) -> dict[str, int]:
    return {label("47", True): right, label("47", False): wrong}


def test_298_right_ones_prove_one_percent_and_297_do_not() -> None:
    assert not proven(counts(297, 0), "47", 0.01, 0.95)
    assert proven(counts(298, 0), "47", 0.01, 0.95)
    assert not proven(counts(298, 0), "46", 0.01, 0.95)
    assert not proven({}, "47", 0.01, 0.95)


def test_wrong_ones_ask_for_more() -> None:
    assert not proven(counts(400, 1), "47", 0.01, 0.95)
    assert proven(counts(472, 1), "47", 0.01, 0.95)
    assert not proven(counts(1000, 100), "47", 0.01, 0.95)


def test_refuted_once_it_is_probably_broken() -> None:
    assert not refuted(counts(0, 0), "47", 0.01, 0.95)
    assert refuted(counts(0, 1), "47", 0.01, 0.95)
    assert not refuted(counts(200, 1), "47", 0.01, 0.95)
    assert refuted(counts(200, 20), "47", 0.01, 0.95)
    assert refuted(counts(10, 10_000), "47", 0.01, 0.95)


@given(st.floats(-1, 1.01))
def test_buckets_are_narrow(similarity: float) -> None:
    number = int(bucket(similarity))
    assert 0.02 * number - 1e-9 <= min(similarity, 0.9999) < 0.02 * (number + 1) + 1e-9


def test_all_wrong_ones_are_counted() -> None:
    assert wrongs({"47:right": 5, "47:wrong": 2, "strict:wrong": 1}) == 3
