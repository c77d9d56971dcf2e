"""What the names of workloads mean, and what a file keeps of their records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.workloads import append, workload


def test_workloads_have_the_tokens_that_their_names_say() -> None:
    assert workload("n3", 7, 5) == [(7, 5)] * 3
    assert workload("first4096", 7, 5) == [(4096, 2)]
    assert workload("short1024", 7, 5) == [(128, 128)] * 1024
    mixed = workload("mixed256", 7, 5)
    assert len(mixed) == 256
    assert all(100 <= tokens <= 1024 for one in mixed for tokens in one)
    assert mixed == workload("mixed256", 1, 1)
    with pytest.raises(ValueError, match="no workload"):
        workload("many", 1, 1)


def test_a_record_takes_the_place_of_one_that_was_measured_alike(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    alike: dict[str, object] = {name: name for name in ("device", "model", "path", "workload", "revision")}
    flagged: dict[str, object] = {**alike, "flags": ["--server.fronts=4"]}
    append(kept, [{**alike, "rate": 1}])
    append(kept, [{**flagged, "rate": 2}])
    append(kept, [{**alike, "revision": "next", "rate": 3}])
    append(kept, [{**alike, "rate": 4}])
    assert [one["rate"] for one in json.loads(kept.read_text())] == [2, 3, 4]
