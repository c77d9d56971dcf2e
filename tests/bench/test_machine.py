"""What is kept of benches and tests that run in turns, and host times over devices that answer at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import host_steps, machine
from bench.host_steps import InstantRunner
from engine.worker import replay

ROOT = Path(__file__).resolve().parents[2]
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one"/><testcase classname="tests.a" name="two"><failure/></testcase>
<testcase classname="tests.b" name="three"><skipped/></testcase>
<testcase classname="tests.b" name="four"><error/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("rows", [1, 8, 20])
def test_the_hosts_time_over_devices_that_answer_at_once(rows: int) -> None:
    runner = InstantRunner(24, 1216)
    found = host_steps.measure(runner.run, runner.limits, runner.pages, rows, 30)
    assert 0 < found.host_us_per_step <= found.host_us_p90
    assert found.waits_per_step == 0
    assert found.tokens_per_step > 1


def run_of(out: Path, *names: str) -> machine.MachineRun:
    return machine.MachineRun([machine.Tree(name, ROOT, "abc") for name in names], out, 600.0)


def test_trees_stand_beside_each_other_and_the_better_turn_counts(tmp_path: Path) -> None:
    run = run_of(tmp_path, "before", "after")
    before, after = run.trees
    for tree, rate, took in ((before, 10.0, 5.0), (after, 11.0, 4.0), (after, 9.0, 3.0), (before, 12.0, 6.0)):
        run.findings.add("m", tree, {"n1": (rate, "tokens/s"), "host": (took, "µs")})
    run.close()
    rate, took = json.loads((tmp_path / "machine.json").read_text())["figures"]
    assert (rate["workload"], rate["before"], rate["after"]) == ("n1", 12.0, 11.0)
    assert (took["workload"], took["before"], took["after"]) == ("host", 5.0, 3.0)


@pytest.mark.product
def test_a_process_that_fails_or_has_no_time_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path, "before")
    assert run.process("version", run.trees[0], ("platform",)) is not None
    assert run.process("broken", run.trees[0], ("bench.nothing_of_the_kind",)) is None
    run._end -= 600.0
    assert run.process("late", run.trees[0], ("platform",)) is None
    run.close()
    assert (run.findings.failed, run.findings.not_run) == (["before: broken"], ["before: late"])


def test_the_tests_report_is_counted(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    assert machine._counted(report)["passed"] == 0
    report.write_text(REPORT)
    found = machine._counted(report)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert found["failures"] == ["tests.a::two", "tests.b::four"]


def test_every_command_is_one_that_there_is() -> None:
    found = list(machine.jobs(machine.PARTS, machine.MODELS))
    assert len(found) == 2 + 3 * len(machine.MODELS)
    for job in found:
        assert (ROOT / (job.command[0].replace(".", "/") + ".py")).is_file()
    parsers = {"bench.host_steps": host_steps.arguments}
    for name in ("decode", "offline"):
        __import__(f"bench.{name}")
        parsers[f"bench.{name}"] = sys.modules[f"bench.{name}"].arguments
    for job in found:
        if job.command[0] in parsers:
            parsers[job.command[0]](job.command[1:])


@pytest.mark.product
def test_recorded_plans_are_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = str(ROOT / "models" / "demo-draft"), tmp_path / "plans.msgpack"
    assert host_steps.plans_main([f"--model={model}", "--device=cpu", "--steps=120", f"--out={file}"]) == 0
    assert replay.main([str(file), f"--model={model}", "--device=cpu"]) == 0
    assert "all equal" in capsys.readouterr().out
