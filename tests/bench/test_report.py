"""The page of results: what each bench shows, nothing foreign, markup as text."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.result import Result

ROW = {"tokens_per_second": 120.0, "us_p50": 8000.0, "us_p95": 9000.0, "us_p99": 9900.0, "bytes": 27_000_000}
FIRST = {"ms_p50": 20.0, "ms_p95": 30.0}
LOAD = {"output_tokens_per_second": 100.0, "requests_per_second": 2.0, "errors": 0}
LOAD |= {f"{name}_{share}": 5.0 for name in ("ttft_ms", "tpot_ms") for share in ("p50", "p95", "p99")}
SET = {"tokens_per_second": 2.0, "without": 1.0, "ratio": 2.0, "proposed": 10, "accepted": 7, "acceptance": 0.7}
FIGURES: dict[str, dict[str, Any]] = {
    "decode": {
        "engine": {
            "contexts": {"64": {**ROW, "roofline": 0.4}, "256": ROW},
            "first_token": FIRST,
            "bandwidth": 0.01,
            "peak_bytes": 5 << 20,
            "driver_bytes": 6 << 20,
        }
    },
    "serve": {"loads": [{**LOAD, "workload": name} for name in ("c1", "c4", "rate1", "rate2.5")]},
    "offline": {"loads": [{**LOAD, "workload": "n1", "ttft_ms_p95": 3.0}]},
    "speculation": {"sets": {"copies": {**SET, "same": True}, "code": {**SET, "acceptance": None, "same": False}}},
    "cache": {
        "stored_hits": [7, 8],
        "same": True,
        "prompt_tokens": 100,
        "cached_tokens": 96,
        "ms": {"generated": {"p50": 9.0, "p95": 9.5}, "stored": {"p50": 1.0, "p95": 1.5}},
        "semantic": {"right": 18, "wrong": 0, "of": 18, "wrong_share_95": [0.0, 0.17]},
    },
    "quality": {
        "forms": {
            "8-bit weights": {"perplexity": [9.0, 9.1], "change_percent": [1.0, 0.5, 1.5], "kl": 0.1, "agreement": 0.9},
            "fp8": {"left_out": "no"},
        }
    },
    "steps": {"rows": {"1": {"plan": 1.0, "run": 2.0, "commit": 3.0}}, "operations": [["mm", 0.5, 3.0]]},
    "start": {"engine empty": {"ends": {"ready": 2.0}}, "server full": {"ready": 3.0, "ttft_ms": {"first": 9.0}}},
    "ladder": {
        "rungs": [{"rung": "eager", "tokens_per_second": 5.0, "gain": 1.0, "total": 1.0}],
        "left_out": [{"rung": "graphs", "why": "needs a CUDA device"}],
        "same": False,
    },
    "peers": {
        "rows": [{"peer": "whippet, 1 streams", "tokens_per_second": 5.0, "first_ms": 1.0, "whippet_times": 1.0}],
        "missing": {"vllm": "pip install vllm"},
        "versions": {"whippet": "1"},
    },
}


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, figures in FIGURES.items():
        result = Result(name, {"model": "<script>alert(1)</script>"}, figures, {}, "abc", "a CPU")
        (tmp_path / f"{name}.json").write_text(json.dumps(result.record()))
    return tmp_path


@pytest.mark.usefixtures("no_matplotlib")
def test_every_bench_has_its_section(folder: Path) -> None:
    text = report.write(folder).read_text()
    for name in ("roofline", "Load against latency", "Ladder", "Peers", "Acceptance", "95 % certainty", "Memory"):
        assert name in text
    assert "graphs is left out: needs a CUDA device" in text
    assert "vllm is missing: pip install vllm" in text
    assert "Of 100 prompt tokens 96 were found" in text
    assert text.count("<svg") >= 14
    assert not list(folder.glob("*.png"))


@pytest.mark.usefixtures("no_matplotlib")
def test_nothing_foreign_is_in_the_page_and_markup_is_text(folder: Path) -> None:
    text = report.write(folder).read_text()
    assert "<script" not in text
    assert not re.search(r"(src|href)=\"(?!#)", text)
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_a_number_reaches_the_picture() -> None:
    chart = report.Chart("rates", "tokens/s", ["a", "b"], {"x": [50.0, 100.0]}, bars=True)
    heights = [float(found) for found in re.findall(r'height="([\d.]+)" fill', report.svg(chart))]
    bars = [one for one in heights if one != 12]
    assert bars[1] == pytest.approx(2 * bars[0], rel=0.01)
    assert chart.most == 100.0


def test_an_empty_value_leaves_a_gap() -> None:
    chart = report.Chart("rates", "tokens/s", ["a", "b"], {"x": [None, 4.0]})
    assert report.svg(chart).count("<circle") == 1


@pytest.mark.product  # matplotlib starts fc-list
def test_pictures(folder: Path) -> None:
    report.write(folder)
    assert len(list(folder.glob("*.png"))) >= 14
