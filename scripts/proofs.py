"""Runs the proofs: tests that need much time or a quiet machine, and other tiers' tests in stricter settings.

    python -m scripts.proofs                     # runs what `make proofs` runs
    python -m scripts.proofs tests/timing -k text

These tests may measure time, so that a busy machine can fail one of them. A test that fails is therefore run once more,
alone. If it passes then, it is listed as flaky at the end and the run is green; if it fails again, the run is red.
`make check` and `make test` repeat nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.flakes import last_failed

ROOT = Path(__file__).resolve().parents[1]
# Features that the `isa` part hides from our kernels; OLD_CPU limits torch and oneDNN in the same way.
_HIDDEN = "avx512f,avx512bw,avx512vl,avx512dq,avx512_vnni,avx512_bf16,avx_vnni,amx_tile,amx_int8,amx_bf16,bf16"
OLD_CPU = {"CPU_HIDE_FEATURES": _HIDDEN, "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@dataclass(frozen=True)
class PytestCall:
    arguments: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


def parts(jobs: int) -> list[PytestCall]:
    """Lists the calls of pytest that make up the proofs. Property tests of all tiers run beside the proofs, with all
    their examples. Tests that measure time run last, one at a time, because load from other tests would fail them."""
    side_by_side = ("-n", str(jobs), "--dist", "worksteal")
    return [
        PytestCall(
            (*side_by_side, "--tier", "proofs", "--tier", "properties", "--ignore=tests/timing"),
            {"HYPOTHESIS_PROFILE": "full"},
        ),
        PytestCall((*side_by_side, "--tier", "isa"), OLD_CPU),
        PytestCall(("tests/timing",)),
    ]


def pytest(arguments: Sequence[str], environ: Mapping[str, str], cache: Path) -> int:
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environ}).returncode


@dataclass
class ProofsOutcome:
    """Collects the tests that failed twice (`failed`) or once (`flaky`), and the parts that ended in another bad way
    (`broken`)."""

    failed: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def green(self) -> bool:
        return not (self.failed or self.broken)


def prove(part: PytestCall, outcome: ProofsOutcome) -> None:
    """Runs a part, then runs each of its failed tests once more, alone."""
    with tempfile.TemporaryDirectory() as folder:
        code = pytest(part.arguments, part.environ, Path(folder))
        once = last_failed(Path(folder))
    if code not in (0, 1) or (code == 1 and not once):
        outcome.broken.append(f"pytest {' '.join(part.arguments)}: exit code {code}")
    for name in once:
        print(f"\nproofs: {name} failed; running it once more, alone", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            again = pytest([name], part.environ, Path(folder))
        (outcome.failed if again else outcome.flaky).append(name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.proofs", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--jobs", type=int, default=4, help="processes that test at once")
    options, rest = parser.parse_known_args()
    outcome = ProofsOutcome()
    for part in [PytestCall(tuple(rest))] if rest else parts(options.jobs):
        prove(part, outcome)
    for title, names in (("failed twice", outcome.failed), ("broken", outcome.broken), ("flaky", outcome.flaky)):
        if names:
            print(f"\nproofs: {title}:", *names, sep="\n  ")
    return 0 if outcome.green else 1


if __name__ == "__main__":
    sys.exit(main())
