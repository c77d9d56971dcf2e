"""The arithmetic of two fronts in turns."""

from __future__ import annotations

from bench.front import FrontTurn, by_median, summary


def test_above_one_this_tree_is_the_better() -> None:
    slow, fast = (
        FrontTurn(token=20.0, message=40.0, rate=100.0, size=2.0),
        FrontTurn(token=10.0, message=20.0, rate=300.0, size=2.0),
    )
    found = summary([(slow, fast)] * 3)
    assert (found["token"], found["message"], found["rate"]) == (2.0, 2.0, 3.0)
    assert (found["front_us_per_token"], found["pairs"]) == (10.0, 3)
    assert summary([(fast, slow)])["token"] == 0.5


def test_a_median_is_as_sure_as_its_pairs_are_alike() -> None:
    alike, apart = by_median([1.0] * 9), by_median([0.5, 1.0, 1.5] * 3)
    assert alike == (1.0, 0.0)
    assert apart[0] == 1.0
    assert apart[1] > 0
