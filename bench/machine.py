"""Measures the speed, memory and results that a change of `engine/execution` must not worsen, for one or more trees:

    python -m bench.machine --out "$OUT"
    python -m bench.machine --out "$OUT" --tree before@08c9afe=/tmp/old --tree after=. --parts host decode offline

Parts: `host` measures the host's time per step (`bench.host_steps`), `decode` one stream, `offline` many streams,
`speculation` the speed with drafts on the demo model; `plans` replays on each tree the steps that the first tree
recorded; `tests` runs the last tree's GPU tests. Each bench is a process of its own with the tree as its working
directory, and the trees alternate within each bench. The folder gets machine.json, tests.json, tests.xml, recordings
and log.txt; machine.json is rewritten after each process. It lists as not run whatever did not fit into --seconds.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.result import device, revision

PARTS: Final = ("host", "decode", "offline", "speculation", "plans", "tests")
MODELS: Final = ("qwen3-0.6b", "qwen3-0.6b-awq", "mistral-7b-awq", "mistral-7b")
WORKLOADS: Final = ("n1", "n8", "n16", "n32", "n64", "n128", "n256", "mixed256")
LESS: Final = ("µs", "bytes")  # units in which less is better
_LEAST = 15.0  # seconds; with less time left, no process is started
_ENDING = 30.0  # seconds that interrupted tests get to write their report
Values = dict[str, tuple[float, str]]  # workload → value and unit


@dataclass(frozen=True, slots=True)
class Tree:
    """A checkout to measure; the figures carry its name."""

    name: str
    path: Path
    revision: str


@dataclass(frozen=True, slots=True)
class MachineJob:
    """Describes a process to run and the function that reads its figures. `{records}` in the command stands for the
    path of a JSON file that the process writes."""

    part: str
    model: str
    command: tuple[str, ...]
    read: Callable[[MachineJob, str, list[dict[str, Any]]], Values]


@dataclass
class MachineFigures:
    trees: Sequence[Tree]
    path: Path
    values: dict[tuple[str, str, str], dict[str, float]] = field(
        default_factory=dict
    )  # model, workload, unit → by tree
    not_run: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, model: str, tree: Tree, found: Values) -> None:
        """Adds figures; of a figure that was measured before, keeps the better value."""
        for workload, (value, unit) in found.items():
            held = self.values.setdefault((model, workload, unit), {})
            best = min if unit in LESS else max
            held[tree.name] = best(held.get(tree.name, value), value)

    def write(self) -> None:
        about = {"device": device()}
        rows = [
            {**about, "model": model, "workload": workload, "unit": unit, **by_tree}
            for (model, workload, unit), by_tree in self.values.items()
        ]
        trees = {tree.name: tree.revision for tree in self.trees}
        whole = {"revisions": trees, "not_run": self.not_run, "failed": self.failed, "figures": rows}
        self.path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def _of_host(job: MachineJob, output: str, records: list[dict[str, Any]]) -> Values:
    found: Values = {}
    for one in records:
        found[f"host {one['workload']} step"] = one["host_us_per_step"], "µs"
        found[f"host {one['workload']} token"] = one["host_us_per_token"], "µs"
    return found


def _of_decode(job: MachineJob, output: str, records: list[dict[str, Any]]) -> Values:
    record = json.loads(output.strip().splitlines()[-1])
    engine = record.get("figures", record)["engine"]  # an older tree's record has it at the top
    found: Values = {
        f"decode {context}": (row["tokens_per_second"], "tokens/s") for context, row in engine["contexts"].items()
    }
    found["decode first token"] = engine["first_token"]["ms_p50"] * 1e3, "µs"
    return found | {"decode memory": (engine["driver_bytes"] or engine["peak_bytes"], "bytes")}


def _of_offline(job: MachineJob, output: str, records: list[dict[str, Any]]) -> Values:
    return {f"offline {one['workload']}": (one["output_tokens_per_second"], "tokens/s") for one in records}


def _of_speculation(job: MachineJob, output: str, records: list[dict[str, Any]]) -> Values:
    return {
        f"speculation {one['proposer']} {one['prompts']}": (one["tokens_per_second"], "tokens/s") for one in records
    }


def jobs(parts: Sequence[str], models: Sequence[str]) -> Iterator[MachineJob]:
    """Yields the jobs, the short ones first, since the time may run out."""
    flags: tuple[str, ...]
    if "host" in parts:
        yield MachineJob("host", "instant", ("bench.host_steps", "--instant", "--append={records}"), _of_host)
    if "speculation" in parts:
        flags = ("--parts", "texts", "--prompts=2", "--seconds=1", "--append={records}")
        yield MachineJob("speculation", "demo", ("bench.speculation", *flags), _of_speculation)
    for model in models:
        own = (f"--model=bench/models/{model}", "--load-format=dummy")
        if "host" in parts:
            yield MachineJob("host", model, ("bench.host_steps", *own, "--append={records}"), _of_host)
        if "decode" in parts:
            flags = ("--context", "128", "1024", "8192", "--tokens=512", "--rounds=3", "--first=10")
            yield MachineJob("decode", model, ("bench.decode", *own, *flags), _of_decode)
        if "offline" in parts:
            flags = ("--workloads", *WORKLOADS, "--append={records}")
            yield MachineJob("offline", model, ("bench.offline", *own, *flags), _of_offline)


class MachineRun:
    """Runs the processes one after another until `seconds` have passed."""

    def __init__(self, trees: Sequence[Tree], out: Path, seconds: float) -> None:
        self.trees = trees
        self.out = out
        self._end = time.monotonic() + seconds
        self.findings = MachineFigures(trees, out / "machine.json")
        self._log = (out / "log.txt").open("a")

    @property
    def left(self) -> float:
        """Returns the seconds that remain of the limit; negative after it."""
        return self._end - time.monotonic()

    def job(self, job: MachineJob, tree: Tree) -> None:
        """Runs a job on a tree and adds its figures to the findings."""
        with tempfile.TemporaryDirectory() as folder:
            records = Path(folder) / "records.json"
            command = [part.format(records=records) for part in job.command]
            output = self.process(f"{job.part} {job.model}", tree, command)
            if output is not None:
                made = json.loads(records.read_text()) if records.exists() else []
                self.findings.add(job.model, tree, job.read(job, output, made))
        self.findings.write()

    def process(self, name: str, tree: Tree, command: Sequence[str]) -> str | None:
        """Returns what `python -m command` prints, or None where time is short or the command fails."""
        title = f"{tree.name}: {name}"
        if self.left < _LEAST:
            self.findings.not_run.append(title)
            return None
        began = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", *command],
                cwd=tree.path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=self.left,
            )
        except subprocess.TimeoutExpired:
            self.findings.not_run.append(title)
            return None
        self.log(f"== {title}: {time.monotonic() - began:.1f} s, status {done.returncode}\n{done.stdout}")
        if done.returncode:
            self.findings.failed.append(title)
            return None
        return done.stdout

    def log(self, text: str) -> None:
        """Writes the text to log.txt and its first line to the terminal."""
        self._log.write(text + "\n")
        self._log.flush()
        print(text.splitlines()[0], flush=True)

    def plans(self) -> None:
        """Records steps with the first tree and replays them with every tree."""
        for kind in ((), ("--greedy",)):
            name = "greedy" if kind else "mixed"
            file = (self.out / f"plans-{name}.msgpack").resolve()
            own = ("--model=models/demo", f"--out={file}", *kind)
            if self.process(f"record {name} plans", self.trees[0], ("bench.host_steps", "plans", *own)) is None:
                continue
            for tree in self.trees:
                replay = ("engine.worker.replay", str(file), "--model=models/demo")
                same = self.process(f"replay {name} plans", tree, replay) is not None
                self.findings.add("demo", tree, {f"plans {name} equal": (float(same), "")})
            self.findings.write()

    def tests(self, processes: int) -> None:
        """Runs the GPU tests of the last tree while time is left, and writes counts and failed names to tests.json."""
        tree, report = self.trees[-1], (self.out / "tests.xml").resolve()
        files = sorted(one for one in (tree.path / "tests").rglob("test_*.py") if "mark.gpu" in one.read_text())
        if self.left < _LEAST + _ENDING:
            self.findings.not_run.append("tests")
            return
        flags = ("-m", "gpu", "-q", "-p", "no:cacheprovider", "-n", str(processes), f"--junitxml={report}")
        began = time.monotonic()
        running = subprocess.Popen(
            [sys.executable, "-m", "pytest", *flags, *(str(one.relative_to(tree.path)) for one in files)],
            cwd=tree.path,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        finished = _ended(running, self.left - _ENDING)
        found = _counted(report) | {"finished": finished, "status": running.returncode, "files": len(files)}
        found |= {"device": device(), "revision": tree.revision, "seconds": round(time.monotonic() - began, 1)}
        if running.returncode:
            (self.findings.failed if finished else self.findings.not_run).append("tests")
        (self.out / "tests.json").write_text(json.dumps(found, indent=1) + "\n")
        self.log(f"== tests: {json.dumps(found)}")

    def close(self) -> None:
        self.findings.write()
        self._log.close()


def _ended(running: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits `seconds` for the process, then interrupts it, and kills it if the interrupt does not end it. Returns
    whether the process ended by itself."""
    try:
        running.wait(seconds)
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGINT)
        try:
            running.wait(_ENDING)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
        return False
    return True


def _counted(report: Path) -> dict[str, Any]:
    """Reads the counts and the failed tests from a JUnit report."""
    if not report.exists():
        return {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    failures: list[str] = []
    skipped = count = 0
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        count += 1
        skipped += case.find("skipped") is not None
        if case.find("failure") is not None or case.find("error") is not None:
            failures.append(f"{case.get('classname')}::{case.get('name')}")
    return {
        "passed": count - skipped - len(failures),
        "failed": len(failures),
        "skipped": skipped,
        "failures": failures,
    }


def tree_of(spec: str) -> Tree:
    name, _, path = spec.partition("=")
    name, _, known = name.partition("@")
    if not name or not Path(path, "engine").is_dir():
        raise argparse.ArgumentTypeError(f"{spec!r} names no checkout; NAME[@REVISION]=PATH")
    return Tree(name, Path(path).resolve(), known or revision(Path(path)))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--tree", type=tree_of, action="append", help="NAME[@REVISION]=PATH; by default before=.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="of bench/models")
    parser.add_argument("--turns", type=int, default=1, help="processes of each tree; the best counts")
    parser.add_argument("--seconds", type=float, default=570.0, help="after which nothing is begun and all is ended")
    parser.add_argument("--processes", type=int, default=6, help="that test at once")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every job ran and none failed."""
    given = arguments(argv)
    trees = given.tree or [tree_of("before=.")]
    given.out.mkdir(parents=True, exist_ok=True)
    run = MachineRun(trees, given.out, given.seconds)
    for job in jobs(given.parts, given.models):
        for turn in range(given.turns):
            for tree in trees if turn % 2 == 0 else reversed(trees):
                run.job(job, tree)
    if "plans" in given.parts:
        run.plans()
    if "tests" in given.parts:
        run.tests(given.processes)
    run.close()
    print(json.dumps({"not_run": run.findings.not_run, "failed": run.findings.failed}))
    return int(bool(run.findings.not_run or run.findings.failed))


if __name__ == "__main__":
    sys.exit(main())
