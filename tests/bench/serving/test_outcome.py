"""Figures of streams whose times are known."""

from __future__ import annotations

import json

import pytest

from bench.report import Chart, standalone
from bench.serving.jobs import EndedRequest, JobResult, MachineCounters, bucket, outcome


def well(begun: float, first: float, last: float) -> EndedRequest:
    return EndedRequest(begun, begun, last, first, last, 11, 11, "OK", 11, 1)


def test_rates_are_of_the_window_and_times_of_all() -> None:
    refused = EndedRequest(100.0, 100.0, 100.02, code="RESOURCE_EXHAUSTED", wanted=11, retry=0.5)
    silent = EndedRequest(100.0, 100.0, 100.04, code="UNAVAILABLE", wanted=11)
    cut = EndedRequest(100.0, 100.0, 101.0, 100.5, 100.6, 2, 2, "INTERNAL", 11)
    parts = [
        JobResult([well(100.0, 100.5, 101.5), refused], {bucket(0.1): 10}, {5: 1, 15: 10}, 0.5),
        JobResult([well(100.0, 100.5, 102.5), silent, cut], {bucket(0.2): 10}, {5: 3, 25: 10}, 1.0),
    ]
    found = outcome(
        parts, 100.0, MachineCounters(front=5.0, relays=2.5, gpu=[(99.0, 0.0), (101.0, 90.0), (102.0, 70.0)])
    )
    assert (found.requests, found.errors, found.refused, found.refused_without_retry_info) == (5, 3, 2, 1)
    assert found.accepted_not_ended_once == 1
    assert found.errors_by_status == {"RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1, "INTERNAL": 1}
    assert found.output_tokens_per_second == pytest.approx(24 / 2.5)
    assert found.requests_per_second == pytest.approx(2 / 2.5)
    assert found.ttft_ms["p50"] == pytest.approx(500)
    assert found.tpot_ms["p99"] == pytest.approx(200)
    assert found.itl_ms["p95"] == pytest.approx(200, rel=0.011)
    assert found.refusal_ms["p99"] == pytest.approx(40)
    assert (found.client_cores, found.client_cores_most, found.front_cores) == (0.6, 0.4, 2.0)
    assert found.relay_cores == 1.0
    assert found.gpu_percent == 80.0
    late = outcome(parts, 100.0, MachineCounters(), window=(1.0, 3.0))
    assert late.output_tokens_per_second == pytest.approx(20 / 2)
    assert late.requests_per_second == pytest.approx(2 / 2)
    assert json.dumps(late.record())


def test_nothing_that_came_has_figures_too() -> None:
    found = outcome([JobResult([], {}, {}, 0.0)], 0.0, MachineCounters())
    assert found.output_tokens_per_second == 0.0
    assert found.ttft_ms == {}


def test_a_plot_has_each_load_and_line() -> None:
    lines = {"p50": [1.0, 2.0], "p95": [2.0, 3.0]}
    charts = [Chart("rate", "ms", ["n1", "n2"], lines), Chart("none", "ms", ["n1", "n2"], {"x": [0.0, 0.0]})]
    drawn = standalone("a < b", charts)
    assert drawn.startswith("<svg")
    assert "a &lt; b" in drawn
    assert drawn.count("<polyline") == 3
    assert drawn.count("<circle") == 6
