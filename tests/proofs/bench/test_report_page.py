"""The report in a real browser: headless Chromium, which `make proofs` fetches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import report
from bench.result import Result
from tests.chromium import browser

LOADS = [
    {"workload": name, "output_tokens_per_second": 9.0, "requests_per_second": 1.0, "errors": 0}
    | {f"{kind}_{share}": 5.0 for kind in ("ttft_ms", "tpot_ms") for share in ("p50", "p95", "p99")}
    for name in ("c1", "c4", "c8")
]


@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_shows_its_pictures_and_loads_nothing(width: int, tmp_path: Path) -> None:
    result = Result("serve", {"model": "<b>demo</b>"}, {"loads": LOADS}, {}, "abc", "a CPU")
    (tmp_path / "serve.json").write_text(json.dumps(result.record()))
    target = report.write(tmp_path)
    (tmp_path / "chromium").mkdir()
    with browser(tmp_path / "chromium") as one:
        page = one.page()
        page.size(width, 900)
        page.open(target.as_uri())
        assert page.evaluate("document.querySelectorAll('svg').length") == 3
        assert page.evaluate("document.querySelector('b') === null")
        assert page.evaluate("performance.getEntriesByType('resource').length") == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        widths = page.evaluate("[...document.querySelectorAll('svg')].map(one => one.getBoundingClientRect().width)")
        assert min(widths) > 300
        assert not page.said
