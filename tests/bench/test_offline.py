"""The offline bench end to end on the demo model, and what it keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import offline

pytestmark = pytest.mark.proof

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


def test_records_of_one_revision_take_the_place_of_older_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "found.json"
    flags = [f"--model={DEMO}", "--device=cpu", "--threads=1", "--prompt=9", "--tokens=3", "--max-context=64"]
    for revision, workloads in (("a", ("n1", "n2")), ("b", ("n1",)), ("b", ("n1", "n2"))):
        assert offline.main([*flags, f"--append={kept}", f"--revision={revision}", "--workloads", *workloads]) == 0
    found = json.loads(kept.read_text())
    assert [(one["revision"], one["workload"]) for one in found] == [("a", "n1"), ("a", "n2"), ("b", "n1"), ("b", "n2")]
    wanted = {"device", "revision", "model", "path", "workload", "output_tokens_per_second", "requests_per_second"}
    for one in found:
        assert wanted | {"ttft_ms_p95", "errors"} <= one.keys()
        assert (one["model"], one["path"], one["errors"]) == ("demo", "offline", 0)
        assert one["output_tokens_per_second"] > 0 < one["ttft_ms_p95"]
    assert "n2" in capsys.readouterr().out


def test_first_tokens_beside_streams_are_those_of_who_comes(tmp_path: Path) -> None:
    kept = tmp_path / "found.json"
    flags = [f"--model={DEMO}", "--device=cpu", "--threads=1", "--max-context=1024", "--rounds=1", "--max-sequences=4"]
    assert offline.main([*flags, f"--append={kept}", "--workloads", "beside2"]) == 0
    (found,) = json.loads(kept.read_text())
    assert found["workload"] == "beside2"
    assert found["errors"] == 0
    # Sixteen requests of two tokens beside two of 680.
    tokens = found["output_tokens_per_second"] * found["seconds"]
    assert tokens == pytest.approx(16 * 2 + 2 * 680, rel=0.01)
    assert 0 < found["ttft_ms_p95"] < found["seconds"] * 1e3
