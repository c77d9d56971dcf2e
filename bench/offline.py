"""Throughput of one model without gRPC: N requests handed over at once, in the engine's own loop.

    python -m bench.offline --model bench/models/qwen3-0.6b --load-format dummy --workloads n1 n16 n256 mixed256

Workloads are those of `bench.workloads`, and `besideN`: N streams of 128 tokens in, beside which others of 128 in come
one after the other; first tokens are those of the others, from between two steps on. Random ids, greedy or by
--samplings, whose names then stand behind the workload's. Prints a table; with --append adds a record a workload to a
JSON list. A rate counts all tokens from the first request to the last token, prompts' time included.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from msgspec.structs import replace

from bench.about import device, revision
from bench.driven import asked, planner
from bench.pace import quantile
from bench.workloads import Work, append, workload
from engine.api import GREEDY, SamplingParams
from engine.execution.runner import ModelRunner
from engine.kv.page_pool import PagePool
from engine.scheduling.plan import StepPlan
from engine.settings import PAGE_SIZE, DecoderChoice, Device, EngineSettings, KvDtype, LoadFormat
from engine.worker.build import build

_PROFILED = 40  # steps
_BESIDE, _OTHERS, _APART = 128, 16, 40  # tokens in; those that come beside streams, and tokens of a stream between them
_PASS, _PASSES = 2048, 4  # tokens of the largest pass of prompts, and how many are watched
SAMPLINGS = {
    "greedy": GREEDY,
    "top-k": replace(GREEDY, temperature=1.0, top_k=50, top_p=0.95),
    "top-p": replace(GREEDY, temperature=1.0, top_p=0.95),  # of random weights' logits nearly all tokens are kept
    "penalties": replace(GREEDY, repetition_penalty=1.1, frequency_penalty=0.2),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one workload."""

    output_tokens_per_second: float
    requests_per_second: float
    ttft_ms_p95: float
    seconds: float
    steps: int
    errors: int


def run(
    runner: ModelRunner, work: Work, budget: int, sampling: SamplingParams = GREEDY, beside: Work | None = None
) -> Outcome:
    """All of `work` at once, to their ends. Of `beside`, one comes for every `_APART` tokens of the first of `work`,
    once those before it have their first tokens; first tokens are then those of `beside`."""
    info, generator = runner.info, random.Random(len(work))
    scheduler = planner(runner, PagePool(info.total_pages), budget)
    came: dict[int, float] = {}
    first: dict[int, float] = {}

    def admit(prompt: int, tokens: int) -> None:
        key = len(came)
        ids = tuple(generator.randrange(3, info.vocab_size) for _ in range(prompt))
        scheduler.admit(asked(key, ids, tokens, replace(sampling, seed=key)))
        came[key] = time.monotonic()

    for one in work:
        admit(*one)
    waiting = deque(beside or ())
    began, steps, count, errors, streamed = time.monotonic(), 0, 0, 0, 0
    came.update(dict.fromkeys(came, began))
    while (plan := scheduler.plan(0.0)) is not None:
        events = scheduler.commit(plan, runner.run(plan), 0.0)
        now, steps = time.monotonic(), steps + 1
        for event in events:
            first.setdefault(event.key, now - came[event.key])
            count += len(event.token_ids)
            streamed += len(event.token_ids) if event.key == 0 else 0
            errors += event.failure is not None
        if waiting and len(first) == len(came) and streamed >= (len(came) - len(work) + 1) * _APART:
            admit(*waiting.popleft())
    seconds = time.monotonic() - began
    counted = [took for key, took in first.items() if beside is None or key >= len(work)]
    return Outcome(
        output_tokens_per_second=round(count / seconds, 1),
        requests_per_second=round(len(came) / seconds, 2),
        ttft_ms_p95=round(quantile(counted, 0.95) * 1e3, 1),
        seconds=round(seconds, 3),
        steps=steps,
        errors=errors,
    )


def profile(runner: ModelRunner, rows: int, budget: int, prompt: int) -> list[tuple[str, float, float]]:
    """Kernels of steps of so many rows: name, calls a step and µs a step, most first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    info = runner.info
    scheduler = planner(runner, PagePool(info.total_pages), budget)
    for key in range(rows):
        scheduler.admit(asked(key, tuple(range(3, 3 + prompt)), 4 * _PROFILED))
    running = 0
    while running < rows + 8:
        plan = scheduler.plan(0.0)
        if plan is None:
            break
        running = running + 1 if len(plan.rows) == rows and all(row.count == 1 for row in plan.rows) else 0
        scheduler.commit(plan, runner.run(plan), 0.0)
        if running >= 8:
            break
    torch.cuda.synchronize()
    began, made = time.monotonic(), 0
    with watch(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(_PROFILED):
            plan = scheduler.plan(0.0)
            if plan is None:
                break
            made += sum(len(event.token_ids) for event in scheduler.commit(plan, runner.run(plan), 0.0))
        torch.cuda.synchronize()
    return kernels(found, f"wall a step, {rows} rows, watched", time.monotonic() - began, made / rows)


def profile_prompts(runner: ModelRunner, prompt: int) -> list[tuple[str, float, float]]:
    """Kernels of a pass over as many prompts as it holds: name, calls and µs a pass, most first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    def plan() -> StepPlan:
        scheduler = planner(runner, PagePool(runner.info.total_pages), _PASSES * _PASS)
        for key in range(_PASSES * _PASS // prompt):
            scheduler.admit(asked(key, tuple(range(3, 3 + prompt)), 1))
        found = scheduler.plan(0.0)
        assert found is not None
        return found

    runner.run(plan())
    watched, began = plan(), time.monotonic()
    with watch(activities=[ProfilerActivity.CUDA]) as found:
        runner.run(watched)
        torch.cuda.synchronize()
    return kernels(found, f"wall a pass of {_PASS} tokens, watched", time.monotonic() - began, _PASSES)


def kernels(found: Any, name: str, seconds: float, steps: float) -> list[tuple[str, float, float]]:
    """Of what a profiler saw in so many steps, the clock's seconds first."""
    averages = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
    rows = [(one.key[:90], one.count / steps, one.self_device_time_total / steps) for one in averages[:24]]
    return [(name, 1.0, seconds / steps * 1e6), *rows]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="a folder; with --load-format dummy its config.json suffices")
    parser.add_argument("--load-format", choices=get_args(LoadFormat), default="auto")
    parser.add_argument("--device", choices=get_args(Device), default="auto")
    parser.add_argument("--decoder", choices=get_args(DecoderChoice), default="auto")
    parser.add_argument("--workloads", nargs="+", default=["n1", "n8", "n16", "n32", "n64", "n128", "n256"])
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=["greedy"])
    parser.add_argument("--prompt", type=int, default=128, help="tokens in, of workloads nN")
    parser.add_argument("--tokens", type=int, default=128, help="tokens out, likewise")
    parser.add_argument("--rounds", type=int, default=2, help="of each workload; the best counts")
    parser.add_argument("--max-sequences", type=int, help="unset: as a server chooses")
    parser.add_argument("--max-batch-tokens", type=int, help="prompt tokens a step; unset: as a server chooses")
    parser.add_argument("--max-context", type=int, default=2176, help="tokens")
    parser.add_argument("--kv-bytes", type=int)
    parser.add_argument("--kv-dtype", choices=get_args(KvDtype), default="auto")
    parser.add_argument("--threads", type=int, help="on a CPU")
    parser.add_argument("--append", type=Path, help="a JSON list that gets a record a workload")
    parser.add_argument(
        "--profile",
        type=int,
        nargs="*",
        default=[],
        help="rows whose steps are taken apart, and a pass of prompts, on a GPU",
    )
    parser.add_argument("--revision", help="the commit, where git is not")
    return parser.parse_args(argv)


def _work(name: str, prompt: int, tokens: int) -> tuple[Work, Work | None]:
    """A workload by its name, and what comes beside it."""
    streams = name.removeprefix("beside")
    if streams == name or not streams.isdigit():
        return workload(name, prompt, tokens), None
    return [(_BESIDE, (_OTHERS + 1) * _APART)] * int(streams), [(_BESIDE, 2)] * _OTHERS


def record(given: argparse.Namespace, name: str, found: Outcome) -> dict[str, object]:
    """As kept in bench/results."""
    about = {"device": device(), "revision": given.revision or revision(), "model": Path(given.model).name}
    return {**about, "path": "offline", "workload": name, **asdict(found)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    given = arguments(argv)
    settings = EngineSettings(
        model=given.model,
        device=given.device,
        decoder=given.decoder,
        load_format=given.load_format,
        max_sequences=given.max_sequences,
        max_batch_tokens=given.max_batch_tokens,
        max_context=-(-given.max_context // PAGE_SIZE) * PAGE_SIZE,
        kv_bytes=given.kv_bytes,
        kv_dtype=given.kv_dtype,
        threads=given.threads,
    )
    began = time.monotonic()
    runner = build(settings, lambda stage, done, total: None)
    gc.collect()
    gc.freeze()  # as an engine process does
    print(f"{Path(given.model).name}: {runner.info.decoder}, started in {time.monotonic() - began:.1f} s", flush=True)
    records = []
    for wanted, sampling in itertools.product(given.workloads, given.samplings):
        name, how, budget = wanted, SAMPLINGS[sampling], runner.info.max_batch_tokens
        if sampling != "greedy":
            name += f"-{sampling}"
        if given.kv_dtype != "auto":
            name += f"-{given.kv_dtype}"
        work, beside = _work(wanted, given.prompt, given.tokens)
        rounds = [run(runner, work, budget, how, beside) for _ in range(given.rounds)]
        best = max(rounds, key=lambda one: one.output_tokens_per_second)
        records.append(record(given, name, best))
        print(
            f"{name:>20} {best.output_tokens_per_second:10.1f} tok/s {best.requests_per_second:8.2f} req/s"
            f"  first token p95 {best.ttft_ms_p95:8.1f} ms  {best.steps} steps  {best.errors} errors",
            flush=True,
        )
    for rows in given.profile:
        for name, calls, microseconds in profile(runner, rows, runner.info.max_batch_tokens, given.prompt):
            print(f"{microseconds:10.1f} µs {calls:7.1f} × {name}")
    if given.profile:
        for name, calls, microseconds in profile_prompts(runner, given.prompt):
            print(f"{microseconds:10.1f} µs {calls:7.1f} × {name}")
    runner.close()
    if given.append is not None:
        append(given.append, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
