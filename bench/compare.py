"""Distinguishes a regression from noise: two results, or two commits whose rounds are interleaved in one run.

    whippet bench compare before.json after.json
    whippet bench compare --before HEAD~1 --model models/demo

The exit code is 0 where nothing is slower, 1 for a regression, 2 where the comparison makes no sense. A figure counts
as slower only if the whole 99 % interval of its change lies beyond --tolerance: two starts of one program differ by a
per cent or two, which no number of rounds would average away.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.result import ROOT, Result, Samples, load, revision

TOLERANCE = 0.015  # of a figure; less is no regression, however sure
_DRAWS = 2_000
_TAIL = 0.005  # on either side of the interval
_LEAST = 5  # rounds, below which an interval says nothing
REGRESSION, NONSENSE = 1, 2  # exit codes


@dataclass(frozen=True, slots=True)
class Change:
    """How much slower (above 0) or faster the second side is: logs of a ratio, the borders of its interval."""

    name: str
    unit: str
    before: float
    after: float
    low: float
    high: float
    rounds: int

    def verdict(self, tolerance: float = TOLERANCE) -> str:
        if self.rounds < _LEAST:
            return "too few rounds"
        beyond = math.log1p(tolerance)
        return "slower" if self.low > beyond else "faster" if self.high < -beyond else "no difference"

    def line(self, tolerance: float = TOLERANCE) -> str:
        low, high = (f"{math.expm1(each):+.1%}" for each in (self.low, self.high))
        return (
            f"{self.name:34} {self.before:12.2f} {self.after:12.2f} {self.unit:9} {low:>7} … {high:>7}"
            f"  {self.verdict(tolerance)}"
        )


def change(name: str, before: Samples, after: Samples, paired: bool, seed: int = 1) -> Change:
    """Bootstraps over pairs of rounds where sides were interleaved, else over each side's rounds."""
    sign = 1 if before.less_is_better else -1
    one, two = (tuple(max(value, 1e-12) for value in side.values) for side in (before, after))
    generator, draws = random.Random(seed), list[float]()
    if paired:
        logs = [sign * math.log(b / a) for a, b in zip(one, two, strict=True)]
        draws = [middle(generator.choices(logs, k=len(logs))) for _ in range(_DRAWS)]
    else:
        for _ in range(_DRAWS):
            a, b = (middle(generator.choices(side, k=len(side))) for side in (one, two))
            draws.append(sign * math.log(b / a))
    draws.sort()
    low, high = draws[int(_TAIL * _DRAWS)], draws[-1 - int(_TAIL * _DRAWS)]
    medians = statistics.median(one), statistics.median(two)
    return Change(name, before.unit, *medians, low, high, min(len(one), len(two)))


def middle(values: Sequence[float]) -> float:
    """Returns the mean of the middle half: nearly as sharp as a mean, and as robust against a busy machine as a
    median."""
    ordered, cut = sorted(values), len(values) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def changes(before: Mapping[str, Samples], after: Mapping[str, Samples], paired: bool) -> list[Change]:
    return [change(name, one, after[name], paired) for name, one in before.items() if name in after]


def regressions(found: Sequence[Change], tolerance: float) -> list[Change]:
    return [one for one in found if one.verdict(tolerance) == "slower"]


# Two files


def samples_of(record: Mapping[str, Any]) -> dict[str, Samples]:
    """Returns the samples by which a record can be compared."""
    return {name: Samples(one["unit"], tuple(one["values"])) for name, one in record["samples"].items()}


def of_files(paths: Sequence[Path]) -> tuple[list[Change], dict[str, Any]]:
    """Raises ValueError where they do not measure the same on the same device."""
    one, two = map(load, paths)
    for key in ("bench", "device"):
        if one[key] != two[key]:
            raise ValueError(f"{key}: {one[key]} and {two[key]} cannot be compared")
    if one["settings"].get("model") != two["settings"].get("model"):
        raise ValueError(f"models: {one['settings'].get('model')} and {two['settings'].get('model')}")
    if not one["samples"] or not two["samples"]:
        raise ValueError("a result without rounds cannot show noise; run it again with --rounds 5 or more")
    figures = {"before": one["revision"], "after": two["revision"], "codes": [one["code"], two["code"]]}
    return changes(samples_of(one), samples_of(two), paired=False), figures


# Two commits


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Yields the commit's files in a folder of its own, which is removed afterwards. Raises ValueError."""
    if not (ROOT / ".git").exists():
        raise ValueError("--before needs a checkout: an installed wheel has no other commits")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "before"
        done = subprocess.run(
            ["git", "worktree", "add", "--detach", str(path), commit], cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode:
            raise ValueError(done.stderr.strip().splitlines()[-1])
        try:
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(path)], cwd=ROOT, capture_output=True)


class TreeProcess:
    def __init__(self, tree: Path, arguments: Sequence[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
        words = [sys.executable, str(Path(__file__).with_name("turns.py")), *arguments]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=tree
        )

    def ready(self) -> None:
        """Waits for the model. Raises RuntimeError."""
        while self._line().strip() != "ready":
            pass

    def round(self) -> dict[str, float]:
        """Runs one round in the process. Raises RuntimeError."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, float] = json.loads(self._line())
        return found

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a measuring process ended before its answer")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


UNITS = {"step_us": "µs", "tokens_per_second": "tokens/s", "first_ms": "ms"}
Side = Callable[[], Mapping[str, float]]  # one round


def interleave(
    before: Side, after: Side, rounds: int, say: Callable[[int], None] = lambda number: None
) -> tuple[dict[str, Samples], dict[str, Samples]]:
    """Rounds of both sides in pairs; the side that begins alternates, so that neither always runs in the other's
    wake."""
    found: tuple[list[Mapping[str, float]], list[Mapping[str, float]]] = ([], [])
    for number in range(rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            found[side].append((before, after)[side]())
        say(number + 1)
    one, two = (
        {name: Samples(unit, tuple(each[name] for each in side)) for name, unit in UNITS.items()} for side in found
    )
    return one, two


def of_commits(given: argparse.Namespace, before: Path, after: Path) -> tuple[dict[str, Samples], dict[str, Samples]]:
    """Measures both trees' engines; processes are started anew --starts times, since two starts differ."""
    words = [f"--model={Path(given.model).resolve()}", f"--load-format={given.load_format}"]
    words += [f"--rows={given.rows}", f"--tokens={given.tokens}"]
    words += [] if given.threads is None else [f"--threads={given.threads}"]
    parts = []
    for start in range(given.starts):
        with ExitStack() as stack:
            sides = [TreeProcess(tree, words) for tree in (before, after)]
            for one in sides:
                stack.callback(one.close)
            for one in sides:
                one.ready()

            def say(number: int, start: int = start) -> None:
                sys.stderr.write(f"\rstart {start + 1} of {given.starts}, round {number} of {given.rounds} ")

            parts.append(interleave(sides[0].round, sides[1].round, given.rounds, say))
    sys.stderr.write("\n")
    return joined([part[0] for part in parts]), joined([part[1] for part in parts])


def joined(parts: Sequence[Mapping[str, Samples]]) -> dict[str, Samples]:
    return {
        name: Samples(one.unit, tuple(value for part in parts for value in part[name].values))
        for name, one in parts[0].items()
    }


def command(argv: Sequence[str] | None = None) -> tuple[Result, int]:
    parser = argparse.ArgumentParser(
        prog="whippet bench compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="two results of one bench, before and after")
    parser.add_argument("--before", metavar="COMMIT", help="beside this tree, instead of files; needs a checkout")
    parser.add_argument("--model", default=str(ROOT / "models" / "demo"), help="with --before")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rows", type=int, default=1, help="sequences at once")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--threads", type=int, help="on a CPU")
    parser.add_argument("--rounds", type=int, default=20, help="of a start; each runs both sides")
    parser.add_argument("--starts", type=int, default=3, help="of both processes")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="share that is no regression")
    given = parser.parse_args(argv)
    if bool(given.before) == bool(given.files) or len(given.files) not in (0, 2):
        parser.error("name two files, or --before COMMIT")
    label = {name: value for name, value in vars(given).items() if name != "files"}
    if given.files:
        found, figures = of_files(given.files)
        samples: dict[str, Samples] = {}
    else:
        with worktree(given.before) as tree:
            before, after = of_commits(given, tree, ROOT)
            figures = {"before": revision(tree), "after": revision()}
        # The step's time, which comes first, decides: rates and first tokens of short rounds swing with the machine.
        found = changes(before, after, paired=True)
        samples = {
            f"{name}, {when}": one
            for when, side in (("before", before), ("after", after))
            for name, one in side.items()
        }
    for one in found:
        print(one.line(given.tolerance))
    worse = regressions(found if given.files else found[:1], given.tolerance)
    print("; ".join(f"{one.name} is slower" for one in worse) or "no regression")
    rows = [
        {"name": one.name, "verdict": one.verdict(given.tolerance), "low": one.low, "high": one.high} for one in found
    ]
    return Result("compare", label, {**figures, "changes": rows}, samples), REGRESSION if worse else 0
