"""Runs `whippet bench`, one command for what users measure. Each part prints a table and ends in one JSON line."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.result import ROOT, Result, device, finish
from engine.errors import EngineError

NONSENSE, INTERRUPTED = 2, 130  # exit codes
DEMO = ROOT / "models" / "demo"


@dataclass(frozen=True, slots=True)
class BenchPart:
    """Describes a part of the command. `runs` names the function that gets its flags and gives a Result, or that and
    a code."""

    runs: str
    help: str
    target: bool = False  # it can measure a server that runs


PARTS = {
    "decode": BenchPart(
        "bench.decode:command", "one stream: tokens a second, gaps, first token, memory, roofline", True
    ),
    "serve": BenchPart("bench.serve:command", "load over gRPC: streams, arrivals, traces, files of prompts", True),
    "offline": BenchPart("bench.offline:command", "many requests at once in the engine, without gRPC"),
    "speculation": BenchPart("bench.live:speculation", "drafts: with and without, in turns", True),
    "cache": BenchPart("bench.live:cache", "stored answers, known beginnings, questions in other words", True),
    "quality": BenchPart("bench.quality:command", "what fewer bits cost this model"),
    "steps": BenchPart("bench.host_steps:command", "where a step's microseconds go"),
    "start": BenchPart("bench.start:command", "seconds until ready, with empty and with full caches"),
    "ladder": BenchPart("bench.ladder:command", "the same work with the optimisations switched on one after another"),
    "peers": BenchPart(
        "bench.peers:command", "beside transformers, vLLM, SGLang, nano-vllm and llama.cpp, where installed"
    ),
    "compare": BenchPart("bench.compare:command", "a regression or noise: two results, or two commits in turns"),
}
NEEDS_MODEL = ("decode", "offline", "start")


@dataclass(frozen=True, slots=True)
class BenchRun:
    """A part of `all`; it is ended after `seconds`."""

    part: str
    flags: tuple[str, ...]
    seconds: float = 150.0


def runs(given: argparse.Namespace) -> Iterator[BenchRun]:
    """Yields the parts of `all`, shortest first, so that an interrupted run has most of them."""
    folder = given.model is not None and Path(given.model).is_dir()
    where = (f"--target={given.target}", f"--token={given.token}") if given.target else (f"--model={given.model}",)
    yield BenchRun("decode", (*where, "--context", "64", "256", "--tokens=48", "--rounds=5", "--first=5"))
    yield BenchRun(
        "serve", (*where, "--concurrency=1,4,8", "--rate=1,2,4", "--seconds=6", "--tokens=32", "--prompt=64")
    )
    yield BenchRun("speculation", (*where, "--tokens=64", "--rounds=5"))
    yield BenchRun("cache", (*where, "--rounds=8"))
    if given.target:
        return
    yield BenchRun("steps", (*where, "--steps=60"))
    yield BenchRun(
        "offline", (*where, "--workloads", "n1", "n4", "n8", "--prompt=64", "--tokens=32", "--max-context=256")
    )
    yield BenchRun("start", (*where, "--max-context=1024", "--max-sequences=4"))
    if folder:
        yield BenchRun("quality", (*where, "--windows=8", "--length=128"))
    yield BenchRun("ladder", (*where, "--tokens=24", "--rounds=3"), 240.0)
    gguf = (f"--gguf={given.gguf}",) if given.gguf else ()
    yield BenchRun("peers", (*where, *gguf, "--rounds=5", "--tokens=32", "--streams", "1", "4"), 240.0)


def all_parts(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="whippet bench all", description=all_parts.__doc__, allow_abbrev=False)
    parser.add_argument("--model", default=str(DEMO) if DEMO.exists() else None, help="a folder or a GGUF file")
    parser.add_argument("--target", metavar="HOST:PORT", help="a server that runs; fewer parts")
    parser.add_argument("--token", default="", help="of a caller of that server")
    parser.add_argument("--gguf", help="the same model for llama.cpp")
    parser.add_argument("--output", type=Path, default=Path("whippet-bench"), metavar="NAME", help="%(default)s")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="of all")
    parser.add_argument("--seconds", type=float, default=600.0, help="in all; what does not fit is left out")
    given = parser.parse_args(argv)
    if given.model is None and given.target is None:
        parser.error("name a model: --model FOLDER, or a GGUF file; or a --target that serves one")
    given.output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    wanted = [one for one in runs(given) if not given.parts or one.part in given.parts]
    with (given.output / "log.txt").open("w") as log:
        for number, one in enumerate(wanted, 1):
            left = given.seconds - (time.monotonic() - began)
            print(f"{number}/{len(wanted)} {one.part:12} ", end="", flush=True)
            print(
                _one(one, given.output, min(one.seconds, left), log) if left > 10 else "left out: no time", flush=True
            )
    from bench.report import write

    page = write(given.output)
    print(f"{time.monotonic() - began:.0f} s; the report is {page}", flush=True)
    return 0 if any((given.output / f"{one.part}.json").exists() for one in wanted) else 1


def _one(one: BenchRun, folder: Path, seconds: float, log: Any) -> str:
    """Runs a part in a process of its own and returns its outcome for the table."""
    target = folder / f"{one.part}.json"
    target.unlink(missing_ok=True)
    words = [sys.executable, "-P", "-m", "bench", one.part, *one.flags, f"--output={target}"]
    began = time.monotonic()
    log.write(f"\n$ {' '.join(words[4:])}\n")
    log.flush()
    with subprocess.Popen(words, stdout=log, stderr=log, env=_environment()) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            return f"given up after {seconds:.0f} s"
    took = f"{time.monotonic() - began:.0f} s"
    return f"{took}, measured" if target.exists() else f"{took}, failed with {process.returncode}; see log.txt"


def _environment() -> dict[str, str]:
    """Returns the environment with a path that finds this package."""
    from service.cli.interpreter import environment

    return dict(environment())


def report(argv: Sequence[str]) -> int:
    from bench.report import write

    parser = argparse.ArgumentParser(prog="whippet bench report", description=report.__doc__)
    parser.add_argument("folder", type=Path)
    print(write(parser.parse_args(argv).folder))
    return 0


def part(name: str, argv: Sequence[str]) -> int:
    """Runs one part; `--output` is removed here, so that all keep their result in one way."""
    words, output = list(argv), None
    for at, word in enumerate(words):
        if word == "--output" or word.startswith("--output="):
            value = word.partition("=")[2] if "=" in word else "".join(words[at + 1 : at + 2])
            del words[at : at + 1 if "=" in word else at + 2]
            output = Path(value)
            break
    flagged = any(word.startswith(("--model", "--target", "-h", "--help")) for word in words)
    if name in NEEDS_MODEL and not flagged and DEMO.exists():
        words.append(f"--model={DEMO}")
    if any(word.startswith("--target") for word in words) and not PARTS[name].target:
        raise ValueError(f"{name} measures an engine of its own, not a server that runs")
    module, _, function = PARTS[name].runs.partition(":")
    run: Callable[[Sequence[str]], Any] = getattr(importlib.import_module(module), function)
    found = run(words)
    result, code = found if isinstance(found, tuple) else (found, 0)
    assert isinstance(result, Result)
    finish(result, output)
    return int(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a part. Returns the exit code: 2 for a command line that makes no sense."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    try:
        if name == "all":
            return all_parts(words[1:])
        if name == "report":
            return report(words[1:])
        if name in PARTS:
            return part(name, words[1:])
    except ModuleNotFoundError as error:
        sys.stderr.write(f"whippet bench: {error.name} is missing: install it, or the extra `bench` as a whole\n")
        return 1
    except (ValueError, EngineError) as error:
        sys.stderr.write(f"whippet bench {name}: {error}\n")
        return NONSENSE
    except KeyboardInterrupt:
        return INTERRUPTED
    _usage().parse_args(words)
    return NONSENSE


def _usage() -> argparse.ArgumentParser:
    lines = [f"  {name:<12}{one.help}" for name, one in PARTS.items()]
    lines += ["  all         every part into a folder, and the report", "  report      the report of a folder, anew"]
    targets = ", ".join(name for name, one in PARTS.items() if one.target)
    parser = argparse.ArgumentParser(
        prog="whippet bench",
        usage="whippet bench PART [flags] [--output NAME]",
        description=f"Measures Whippet on this machine ({device()}). Each part prints a table, then one line of JSON, "
        f"which --output NAME keeps in NAME.json. With --target, {targets} measure a server that runs.",
        epilog="parts:\n" + "\n".join(lines) + "\n\n`whippet bench PART --help` lists the flags of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=[*PARTS, "all", "report"], metavar="PART", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
