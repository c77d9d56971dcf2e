"""The bound against scipy's Beta distribution, and what one caller can do to it: nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta

from cache.semantic.evidence import (
    AGE,
    CALLERS,
    CALLERS_A_DAY,
    DAY,
    MOST_CALLERS,
    RIGHT_A_DAY,
    TENANT_A_DAY,
    Evidence,
    TenantDay,
    chance_above,
    counted,
    proven,
    refuted,
    unpack_day,
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
    """As even among the least number of callers as can be, and old enough."""
    each, more = divmod(right, CALLERS)
    return old({bytes([caller]): each + (caller < more) for caller in range(CALLERS)}, wrong)


def old(right: dict[bytes, int], wrong: int = 0) -> Evidence:
    return Evidence(right, wrong, first=1, last=1 + AGE)


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
    assert not proven(old({b"a": 1_000_000}), *BOUND)
    assert not proven(old({b"a": 1_000_000, b"b": 1_000_000, b"c": 1_000_000}), *BOUND)
    assert not proven(old({b"a": 1_000_000, b"b": 24, b"c": 24, b"d": 24}), *BOUND)
    assert proven(old({b"a": 1_000_000, b"b": 75, b"c": 75, b"d": 75}), *BOUND)


MIDNIGHT = 20_000 * DAY


def bought(callers: int, a_day: int, begin: float = MIDNIGHT, days: int = 40) -> tuple[Evidence, float, int]:
    """What so many callers prove by so many right observations a day, as soon as the bound holds: the evidence, the
    seconds since the first, and how many they made."""
    evidence, made = Evidence(), 0
    for number in range(days * a_day):
        now = begin + number * DAY / a_day
        evidence, made = evidence.with_right(bytes([number % callers]), now), made + 1
        if proven(evidence, *BOUND):
            return evidence, now - begin, made
    return evidence, float("inf"), made


@pytest.mark.parametrize("begin", [MIDNIGHT, MIDNIGHT + DAY - 1, MIDNIGHT + DAY / 2])
@pytest.mark.parametrize(("callers", "a_day"), [(4, 300), (20, 300), (20, 20_000), (32, 400)])
def test_twenty_credentials_buy_no_sooner_than_four(callers: int, a_day: int, begin: float) -> None:
    """100 a day count and two new callers: 298 need three days of the calendar, and a day by the clock."""
    evidence, taken, made = bought(callers, a_day, begin)
    assert evidence.counted >= 298
    assert made >= 298
    assert taken >= AGE
    assert (begin + taken) // DAY - begin // DAY >= 2
    assert not proven(Evidence(evidence.right, 0, evidence.first, evidence.first + AGE - 1), *BOUND)


def test_of_a_day_only_so_many_count_and_of_new_callers_only_so_many() -> None:
    evidence = Evidence()
    for number in range(5 * RIGHT_A_DAY):
        evidence = evidence.with_right(bytes([number % 3]), MIDNIGHT + number)
    assert sum(evidence.right.values()) == evidence.today == RIGHT_A_DAY
    assert len(evidence.right) == evidence.new == CALLERS_A_DAY
    assert evidence.with_right(b"new", MIDNIGHT + DAY - 1) is evidence
    after = evidence.with_right(b"new", MIDNIGHT + DAY)
    assert (len(after.right), after.today, after.new) == (CALLERS_A_DAY + 1, 1, 1)


def test_a_clock_that_goes_back_a_day_counts_nothing() -> None:
    evidence = Evidence().with_right(b"a", MIDNIGHT + DAY)
    assert evidence.with_right(b"a", MIDNIGHT) is evidence
    assert TenantDay().with_one(MIDNIGHT + DAY).with_one(MIDNIGHT) is None  # type: ignore[union-attr]


def test_of_a_tenant_only_so_many_count_a_day() -> None:
    """Over all differences: no more than three become proof for each day that it asks."""
    day: TenantDay | None = TenantDay()
    for number in range(TENANT_A_DAY):
        assert day is not None
        day = day.with_one(MIDNIGHT + number)
    assert day is not None
    assert day.with_one(MIDNIGHT + DAY - 1) is None
    assert day.with_one(MIDNIGHT + DAY) == TenantDay(MIDNIGHT // DAY + 1, 1)
    assert TENANT_A_DAY // 298 == 3


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_day_is_read_as_it_was_written(day: int, count: int) -> None:
    assert unpack_day(TenantDay(day, count).packed()) == TenantDay(day, count)


@given(st.binary(max_size=30))
def test_other_bytes_are_no_day(data: bytes) -> None:
    found = unpack_day(data)
    assert found is None or found.counted >= 0


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
    for number, (caller, right) in enumerate(seen):
        timed = found.with_right(caller, MIDNIGHT + number * DAY / 9)
        found = timed if right and number % 2 else found.with_one(caller, right)
    assert len(found.right) <= MOST_CALLERS
    assert found.wrong == sum(not right for _, right in seen)
    assert unpack_evidence(found.packed()) == found


@given(st.binary(max_size=60))
def test_other_bytes_are_nothing(data: bytes) -> None:
    found = unpack_evidence(data)
    assert found is None or (found.wrong >= 0 and min(found.right.values(), default=0) >= 0)


OLD = b"\x93\x01\x00\x81\xc4\x01a\x05"  # of schema 1, without times
FIRST_AFTER_LAST = b"\x97\x02\x00\x80\x05\x04\x00\x00"


@pytest.mark.parametrize("broken", [b"", OLD, FIRST_AFTER_LAST, b"\x97\x02\xff\x80\x00\x00\x00\x00"])
def test_another_schema_and_numbers_below_zero_are_nothing(broken: bytes) -> None:
    assert unpack_evidence(broken) is None
