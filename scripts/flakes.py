"""Runs one tier of the tests many times on a busy machine and lists every test that failed at least once:

    python -m scripts.flakes check --runs 30 --hogs 2
    python -m scripts.flakes test --runs 20 --hogs 2 --output bench/results/flakes-cpu.json

Each run is the tier's own `make` target. Beside it, `--hogs` processes spin on the processor. Runs differ in
PYTHONHASHSEED, which is the number of the run, and in the order that the workers happen to take the tests in;
hypothesis draws the same examples in each. The exit code is 1 if any run failed.

`--output` adds the record to those of earlier calls in that file, so that many short sessions sum up to a long one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from bench.result import device, revision

ROOT = Path(__file__).resolve().parents[1]
TIERS = ("check", "test", "proofs")
LIMIT = 3600.0  # seconds; a run that takes longer is ended and counts as failed
# Spins until its parent process is gone.
_HOG = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**6):\n        pass\n"
_SUMMARY = re.compile(r"^=+ (.*(?:passed|failed|error|no tests ran).*) in [\d.]+s.*=+$", re.MULTILINE)
_COUNT = re.compile(r"(\d+) (passed|failed|error|skipped)")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+)$", re.MULTILINE)


@dataclass
class TierRun:
    seed: int
    seconds: float
    exit_code: int
    counts: dict[str, int]
    failures: dict[str, str] = field(default_factory=dict)  # test → the first line of its error

    @property
    def green(self) -> bool:
        return self.exit_code == 0 and not self.failures and self.counts.get("passed", 0) > 0


def read(output: str, known: list[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Parses pytest's output into counts by outcome and failed tests with the first line of each error. `known` are the
    ids of failed tests: an id may contain ` - `, which also separates the id from the error."""
    counts: dict[str, int] = {}
    for summary in _SUMMARY.findall(output):
        for number, outcome in _COUNT.findall(summary):
            counts[outcome] = counts.get(outcome, 0) + int(number)
    failures = dict.fromkeys(known, "")
    for line in _FAILED.findall(output):
        name = next((one for one in known if line == one or line.startswith(f"{one} - ")), None)
        if name is None:
            name = line.partition(" - ")[0]
        failures[name] = line[len(name) :].removeprefix(" - ")[:300]
    return counts, failures


def last_failed(folder: Path) -> list[str]:
    """Returns the ids of the tests that pytest's cache in `folder` lists as failed."""
    path = folder / "v" / "cache" / "lastfailed"
    return sorted(json.loads(path.read_text())) if path.exists() else []


@contextlib.contextmanager
def hogs(number: int) -> Iterator[None]:
    """Runs `number` processes that spin on the processor for as long as the block lasts."""
    started = [subprocess.Popen([sys.executable, "-c", _HOG]) for _ in range(number)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def run_group(command: list[str], environ: dict[str, str], out: TextIO) -> int:
    """Runs a command in a process group of its own and returns its exit code. At the end of the time kills the whole
    group, since the tests' processes would outlive `make`."""
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=out, stderr=out, start_new_session=True) as process:
        try:
            return process.wait(LIMIT)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def run(tier: str, seed: int, log: Path) -> TierRun:
    """Runs the tier once and writes its output to `log`."""
    with tempfile.TemporaryDirectory() as folder, log.open("w") as out:
        environ = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTEST_ADDOPTS": f"-o cache_dir={folder}"}
        start = time.monotonic()
        try:
            code = run_group(["make", tier], environ, out)
        except subprocess.TimeoutExpired:
            code = 124
        seconds = time.monotonic() - start
        counts, failures = read(log.read_text(errors="replace"), last_failed(Path(folder)))
    return TierRun(seed, round(seconds, 1), code, counts, failures)


def record(tier: str, busy: int, commit: str, runs: list[TierRun]) -> dict[str, Any]:
    """Builds the record that `--output` keeps of one call of this script, all of whose runs are of `commit`."""
    return {
        "tier": tier,
        "hogs": busy,
        "date": datetime.now(UTC).date().isoformat(),
        "revision": commit,
        "device": device(),
        "python": sys.version.split()[0],
        "green": sum(one.green for one in runs),
        "runs": [asdict(one) for one in runs],
    }


def append(path: Path, entry: dict[str, Any]) -> None:
    """Adds a record to a JSON file of records, which need not exist yet."""
    entries = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*entries, entry], indent=1) + "\n")


def flaky(runs: list[TierRun]) -> dict[str, list[int]]:
    """Maps each test that failed to the seeds of the runs in which it failed."""
    found: dict[str, list[int]] = {}
    for one in runs:
        for name in one.failures:
            found.setdefault(name, []).append(one.seed)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.flakes", description=__doc__.split("\n", 1)[0])
    parser.add_argument("tier", choices=TIERS)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=1, help="the first run's number, which is its seed")
    parser.add_argument("--hogs", type=int, default=2)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="folder for what runs print")
    parser.add_argument("--output", type=Path, help="a JSON file that the record is added to")
    options = parser.parse_args()
    runs: list[TierRun] = []
    commit = revision()  # before the runs: the tree may change after them
    with hogs(options.hogs):
        for seed in range(options.first, options.first + options.runs):
            runs.append(run(options.tier, seed, options.logs / f"flakes-{options.tier}-{seed}.log"))
            last = runs[-1]
            print(f"run {seed}: {'green' if last.green else 'RED'}, {last.seconds:.0f} s, {last.counts}", flush=True)
            for name, message in last.failures.items():
                print(f"    {name}: {message}", flush=True)
    if options.output:
        append(options.output, record(options.tier, options.hogs, commit, runs))
    print(f"{sum(one.green for one in runs)} of {len(runs)} runs of `make {options.tier}` were green")
    for name, seeds in flaky(runs).items():
        print(f"  {name}: failed in {len(seeds)} runs, seeds {seeds}")
    return 0 if all(one.green for one in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
