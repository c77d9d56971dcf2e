"""Runs the GPU tests of the kernels under NVIDIA's compute-sanitizer, on a machine with a GPU:

    python -m scripts.sanitize                       # memcheck and racecheck of every file, four at a time
    python -m scripts.sanitize --tools memcheck --files tests/engine/kernels/test_gpu_step.py --cases 100

Under the tool a test takes far longer, so of each test function a few cases run, spread evenly over the small ones; the
kernels are compiled before, by the same tests without the tool, and torch computes on the CPU (`scripts.on_host`), so
that the tool has none of its kernels to rewrite. Each file is a process of its own under a limit of time, past which it
begins no test. memcheck looks at memory of every kind, racecheck at shared memory alone: it knows nothing of flags in
global memory by which blocks wait for each other.

As a pytest plugin, which it is in those processes, it leaves out all cases but those few, and has every lane say that
it has read its part of the ring of weights (`gemv.cuh`): of fewer racecheck reports what is none.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FILES = "tests/engine/kernels/test_gpu_*.py"
TOOLS = ("memcheck", "racecheck")
# Which tests of a file are small enough, as pytest's -k has it; of files that are not here, all.
SMALL = {
    "test_gpu_attention": "(short and None) or (merges_agree and 130) or (shared_memory and 2303 and None)",
    "test_gpu_batch_attention": "(borders and None) or padding or columns_lie",
    "test_gpu_gated_product": "104-128 or extreme",
    "test_gpu_gemm": "264-256 or rows_of_eight_bits",
    "test_gpu_plain_product": "208-128",
    "test_gpu_prefill": "(test_gate and -6]) or (embedded and 64) or (heads and 32-) or 2-0-16-None",
    "test_gpu_sampling": "(filters and 40-) or empty_rows or left_to_the_head",
    "test_gpu_speculation": "acceptance or (rows_alone and 256)",
    "test_gpu_step": "(float64 and 1-) or stops_limits",
    "test_gpu_two_pass": "77-64",
    "test_gpu_two_pass_top": "77-64",
}
FOLLOWED = {"OP_EACH_ARRIVES": 1}  # see gemv.cuh
KERNELS = "WHIPPET_TEST_KERNELS"  # environment variable: a folder that tests keep compiled kernels in
_CASES, _UNTIL = "WHIPPET_SANITIZED_CASES", "WHIPPET_SANITIZED_UNTIL"
_PASSED = re.compile(r"^(\S+::.+?) PASSED", re.MULTILINE)
_FAILED = re.compile(r"^(\S+::.+?) (?:FAILED|ERROR)", re.MULTILINE)
_KINDS = "Invalid|Error|Warning|Race|Misaligned|Potential|Program hit"
_FINDING = re.compile(rf"^========= ((?:{_KINDS})\b.*)$", re.MULTILINE)
_SUMMARY = re.compile(r"^========= ((?:ERROR|RACECHECK) SUMMARY: .*)$", re.MULTILINE)


def pytest_configure(config: Any) -> None:
    """Leaves the GPU to our own kernels, in the form that tools can follow."""
    from engine.kernels.build import KernelLibrary
    from scripts.on_host import on_gpu

    on_gpu().__enter__()  # type: ignore[no-untyped-call]
    kernel = KernelLibrary.kernel

    def followed(self: KernelLibrary, name: str, entry: str, defines: Mapping[str, int], shared: int = 0) -> Any:
        return kernel(self, name, entry, {**defines, **FOLLOWED}, shared)

    KernelLibrary.kernel = followed  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)  # of those that -k leaves
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keeps as many cases of each test function as were asked for, the first and the last among them."""
    most = int(os.environ[_CASES])
    cases: dict[str, list[Any]] = {}
    for item in items:
        cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    kept = {id(several[at]) for several in cases.values() for at in spread(len(several), most)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def pytest_runtest_setup(item: Any) -> None:
    """Begins no test past the time, so that the tool can report its findings."""
    if time.monotonic() > float(os.environ[_UNTIL]):
        item.session.shouldstop = "the time is up"


def spread(count: int, most: int) -> list[int]:
    """Returns at most `most` of [0, count), evenly apart, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(at * (count - 1) / max(most - 1, 1)) for at in range(most)})


@dataclass(frozen=True, slots=True)
class SanitizerOutcome:
    passed: list[str]
    failed: list[str]
    findings: Counter[str]
    summary: str  # the tool's own; empty where it was cut off

    @property
    def clean(self) -> bool:
        return bool(self.passed and self.summary) and not self.failed and not self.findings


def outcome(tests: str, output: str) -> SanitizerOutcome:
    summaries = _SUMMARY.findall(output)
    findings = Counter(one[:160] for one in _FINDING.findall(output))
    return SanitizerOutcome(
        _PASSED.findall(tests), _FAILED.findall(tests), findings, summaries[-1] if summaries else ""
    )


def sanitize(tool: str, file: Path, given: argparse.Namespace) -> SanitizerOutcome:
    """Runs one file under one tool. Past its time no further test begins; a test that still runs is ended with all it
    started: the tool alone would leave the tests running."""
    log, output = (given.logs / f"{tool}-{file.stem}.{kind}.txt" for kind in ("tests", "tool"))
    command = ["compute-sanitizer", f"--tool={tool}", f"--log-file={output}", "--print-limit=20", *given.option]
    # Ours have C names. torch's take most of the time, and are looked at elsewhere.
    command += ["--kernel-name-exclude=regex=^_Z"]
    # What libraries ask of the driver and are refused is their own affair.
    command += ["--report-api-errors=no"] if tool == "memcheck" else []
    run(command, file, log, given)
    return outcome(log.read_text(errors="replace"), output.read_text(errors="replace") if output.exists() else "")


def run(tool: Sequence[str], file: Path, log: Path, given: argparse.Namespace) -> None:
    """Runs the selected tests of a file, under the command of a tool, or without one."""
    command = [*tool, sys.executable, "-m", "pytest", "-v", "-p", "scripts.sanitize", "-p", "no:cacheprovider"]
    command += ["--tb=short", "-o", "addopts=", "-o", "timeout=0", "-m", "gpu", str(file)]
    only = SMALL.get(file.stem, "") if given.only is None else given.only
    command += ["-k", only] if only else []
    environment = {**os.environ, _CASES: str(given.cases), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment[KERNELS] = str(given.logs.resolve() / "kernels")
    environment[_UNTIL] = repr(time.monotonic() + given.seconds)
    with (
        log.open("w") as stream,
        subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT, process_group=0) as process,
    ):
        try:
            process.wait(given.seconds + given.grace)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 where every file ended and nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--files", nargs="+", type=Path, default=sorted(Path().glob(FILES)))
    parser.add_argument("--only", help="tests, as pytest's -k has it; by default small ones")
    parser.add_argument("--cases", type=int, default=4, help="of each test function")
    parser.add_argument("--seconds", type=float, default=600, help="of a file under a tool, until the last test begins")
    parser.add_argument("--grace", type=float, default=120, help="seconds for that test and the tool's summary")
    parser.add_argument("--at-once", type=int, default=4, help="processes")
    parser.add_argument("--logs", type=Path, default=Path("."), help="where the tool's output is kept, a file each")
    parser.add_argument("--option", action="append", default=[], help="of compute-sanitizer")
    given = parser.parse_args(argv)
    given.logs.mkdir(parents=True, exist_ok=True)
    clean = True

    def one(pair: tuple[str, Path]) -> bool:
        found = sanitize(*pair, given)
        lines = [f"{pair[0]} {pair[1].name}: {len(found.passed)} passed; {found.summary or 'cut off'}"]
        lines += [f"    failed: {name}" for name in found.failed]
        lines += [f"    {count} × {what}" for what, count in found.findings.most_common(5)]
        print("\n".join(lines), flush=True)
        return found.clean

    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(lambda file: run((), file, given.logs / f"plain-{file.stem}.tests.txt", given), given.files))
        for ended in pool.map(one, [(tool, file) for tool in given.tools for file in given.files]):
            clean = clean and ended
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
