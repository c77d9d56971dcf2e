"""The load bench end to end, on a server with the fake engine that it starts itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import serve

pytestmark = pytest.mark.proof

SERVER = ["--engine=fake", "--scheduler.max-sequences=4", "--limits.queued-requests=8", "--fake.step-time=0.02"]


def test_loads_and_gates_on_one_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, drawn = tmp_path / "found.json", tmp_path / "found.svg"
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 30 * at, "input_length": 8, "output_length": 4, "hash_ids": [at]} for at in range(4)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    flags = ["--workloads", "n3", "--concurrency=2", "--rate=20", f"--trace={trace}", "--overload=20", "--interactive"]
    sizes = ["--prompt=5", "--tokens=12", "--seconds=2", "--rounds=1", "--processes=2", "--revision=r"]
    assert serve.main([*flags, *sizes, f"--append={kept}", f"--plot={drawn}", *SERVER]) == 0
    found = {one["workload"]: one for one in json.loads(kept.read_text())}
    loads = ["n3", "c2", "rate20", "trace trace.jsonl", "c4", "overload20", "alone", "background", "beside"]
    assert list(found) == loads
    for one in found.values():
        assert (one["path"], one["revision"], one["accepted_not_ended_once"]) == ("grpc", "r", 0)
        assert one["requests"] > 0
        assert one["errors"] == sum(one["errors_by_status"].values())
    assert (found["n3"]["requests"], found["n3"]["errors"]) == (3, 0)
    assert found["n3"]["output_tokens_per_second"] > 0 < found["n3"]["ttft_ms_p95"]
    assert (found["trace trace.jsonl"]["requests"], found["trace trace.jsonl"]["too_long"]) == (4, 0)
    assert found["overload20"]["refused"] > 0 == found["overload20"]["refused_without_retry_info"]
    assert found["overload20"]["refusal_ms_p99"] > 0
    assert {"of_peak", "front_cores", "client_cores"} <= found["overload20"].keys()
    assert "tpot_p95_of_alone" in found["beside"]
    assert drawn.read_text().count("<polyline") == 1 + 3 + 3
    assert json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_server_that_runs_takes_no_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["--target=127.0.0.1:1", "--engine=fake"])
    assert "takes no flags: --engine=fake" in capsys.readouterr().err
