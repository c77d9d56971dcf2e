"""Which rungs the ladder has, and each one's gain."""

from __future__ import annotations

from itertools import pairwise

from bench.ladder import QUANTIZED, rungs, table, work

ALL = ("batching", "fused_kernels", "graphs", "two_pass_head", "speculation", "prefix_cache", "response_cache")


def test_each_rung_has_what_the_one_below_has_and_one_thing_more() -> None:
    found, left = rungs(dict.fromkeys(ALL, ""), "")
    assert [one.name for one in found] == ["eager", *ALL[:4], QUANTIZED, *ALL[4:]]
    for below, one in pairwise(found):
        assert len(one.on - below.on) + (one.quantized - below.quantized) == 1
        assert below.on <= one.on
    assert not left


def test_what_does_nothing_here_is_left_out_with_the_servers_reason() -> None:
    switches = {**dict.fromkeys(ALL, ""), "graphs": "needs a CUDA device", "new": ""}
    del switches["two_pass_head"]
    found, left = rungs(switches, "quantized already")
    assert [(one.name, one.why) for one in left] == [
        ("graphs", "needs a CUDA device"),
        ("two_pass_head", "this build has no such switch"),
        (QUANTIZED, "quantized already"),
    ]
    assert "new" in [one.name for one in found]
    assert not any(one.quantized for one in found)


def test_gains_are_of_rounds_side_by_side() -> None:
    rows = table({"eager": [10.0, 20.0, 40.0], "batching": [20.0, 40.0, 80.0], "speculation": [30.0, 60.0, 40.0]})
    assert [row["gain"] for row in rows] == [1.0, 2.0, 1.5]
    assert [row["total"] for row in rows] == [1.0, 2.0, 3.0]


def test_the_work_of_a_round_asks_some_twice_and_no_round_asks_anothers() -> None:
    one, two = ([asked.text for group in work(8, turn) for asked in group] for turn in (1, 2))
    assert len(one) - len(set(one)) == 2
    assert not set(one) & set(two)
