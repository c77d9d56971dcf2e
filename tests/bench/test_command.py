"""`whippet bench`: which parts there are, where results go, and what is refused."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from bench import __main__ as command
from bench.__main__ import PARTS, main
from bench.live import interval
from bench.result import Result, Samples, code_hash, digest, measured_code
from scripts.results import flat, nameless, older

pytestmark = pytest.mark.product  # the parts import torch and all that it asks the machine
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.result.revision", lambda: "abc")
    monkeypatch.setattr("bench.result.device", lambda: "a CPU")
    monkeypatch.setattr(command, "device", lambda: "a CPU")


def test_every_part_has_a_function() -> None:
    for part in PARTS.values():
        module, _, function = part.runs.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("how", [["--output", "{}"], ["--output={}"]])
def test_a_result_is_kept_and_printed(
    how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []

    def run(argv: list[str]) -> Result:
        seen.append(argv)
        return Result("steps", {"model": tmp_path}, {"a": 1}, {"x": Samples("ms", (1.0,))})

    monkeypatch.setattr("bench.host_steps.command", run)
    name = str(tmp_path / "deep" / "one")
    assert main(["steps", *(word.format(name) for word in how), "--rows=1"]) == 0
    assert seen == [["--rows=1"]]
    kept = json.loads((tmp_path / "deep" / "one.json").read_text())
    assert kept == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (kept["bench"], kept["revision"], kept["figures"]) == ("steps", "abc", {"a": 1})
    assert kept["code"] == code_hash("steps")
    assert kept["samples"]["x"] == {"unit": "ms", "values": [1.0]}


def test_a_missing_package_and_a_missing_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PARTS, "steps", command.BenchPart("no_such_module_here:command", ""))
    assert main(["steps"]) == 1
    assert "no_such_module_here is missing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["nothing"])


def test_the_hash_is_of_names_and_contents() -> None:
    assert digest({"a": b"1", "b": b"2"}) == digest({"b": b"2", "a": b"1"})
    assert len({digest({"a": b"1"}), digest({"a": b"2"}), digest({"b": b"1"})}) == 3
    assert measured_code("batch_steps") == measured_code("decode") == ("engine", "quant/checkpoint")
    assert "service" in measured_code("serve")


def test_results_of_other_code_are_named_and_fail_nothing(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a.py").write_text("one = 1\n")
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    record = {"bench": "decode", "code": code_hash("decode", tmp_path), "figures": {"engine": 5}}
    (folder / "decode-cpu.json").write_text(json.dumps(record))
    assert not older(tmp_path)
    (tmp_path / "engine" / "a.py").write_text("one = 2\n")
    assert older(tmp_path) == [f"decode-cpu.json, of code {record['code']}"]
    assert not nameless(tmp_path)
    (folder / "serve-cpu.json").write_text("{}")
    assert nameless(tmp_path) == ["serve-cpu.json"]
    assert flat(record)["engine"] == 5


def test_the_interval_of_no_wrong_answers_is_not_nothing() -> None:
    low, high = interval(0, 18)
    assert low == pytest.approx(0.0, abs=1e-12)
    assert 0.15 < high < 0.2
    assert interval(0, 0) == (0.0, 1.0)


def test_bench_has_few_files() -> None:
    assert len(list((ROOT / "bench").rglob("*.py"))) <= 45
