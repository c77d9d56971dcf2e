"""Measures throughput of one model without gRPC: N requests handed over at once, in the engine's own loop.

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
from dataclasses import replace as changed
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import torch
from msgspec.structs import replace

from bench.pace import asked, planner, quantile
from bench.result import Result, Samples, device, finish, revision, run_one_of, summary
from bench.workloads import Work, append, workload
from engine.api import GREEDY, SamplingParams
from engine.execution.runner import ModelRunner
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.plan import RowResult, StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.settings import PAGE_SIZE, DecoderChoice, Device, EngineSettings, KvDtype, LoadFormat
from engine.worker.build import build

_PROFILED = 40  # steps
_BESIDE, _OTHERS, _APART = 128, 16, 40  # tokens in; those that come beside streams, and tokens of a stream between them
_PASS, _PASSES = 2048, 4  # tokens of the largest pass of prompts, and how many are profiled
SAMPLINGS = {
    "greedy": GREEDY,
    "top-k": replace(GREEDY, temperature=1.0, top_k=50, top_p=0.95),
    "top-p": replace(GREEDY, temperature=1.0, top_p=0.95),  # of random weights' logits nearly all tokens are kept
    "penalties": replace(GREEDY, repetition_penalty=1.1, frequency_penalty=0.2),
}


@dataclass(frozen=True, slots=True)
class OfflineOutcome:
    output_tokens_per_second: float
    requests_per_second: float
    ttft_ms_p95: float
    seconds: float
    steps: int
    errors: int


def run(
    runner: ModelRunner, work: Work, budget: int, sampling: SamplingParams = GREEDY, beside: Work | None = None
) -> OfflineOutcome:
    """Runs all of `work` at once, to their ends. One of `beside` follows for every `_APART` tokens of the first of
    `work`, once those before it have their first tokens; first tokens are then those of `beside`."""
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
    return OfflineOutcome(
        output_tokens_per_second=round(count / seconds, 1),
        requests_per_second=round(len(came) / seconds, 2),
        ttft_ms_p95=round(quantile(counted, 0.95) * 1e3, 1),
        seconds=round(seconds, 3),
        steps=steps,
        errors=errors,
    )


def profile(runner: ModelRunner, rows: int, budget: int, prompt: int) -> list[tuple[str, float, float]]:
    """Profiles the kernels of steps of `rows` rows: name, calls a step and µs a step, most first."""
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
    return kernels(found, f"wall a step, {rows} rows, profiled", time.monotonic() - began, made / rows)


def profile_prompts(runner: ModelRunner, prompt: int) -> list[tuple[str, float, float]]:
    """Profiles the kernels of a pass over as many prompts as it holds: name, calls and µs a pass, most first."""
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
    first_plan, began = plan(), time.monotonic()
    with watch(activities=[ProfilerActivity.CUDA]) as found:
        runner.run(first_plan)
        torch.cuda.synchronize()
    return kernels(found, f"wall a pass of {_PASS} tokens, profiled", time.monotonic() - began, _PASSES)


def kernels(found: Any, name: str, seconds: float, steps: float) -> list[tuple[str, float, float]]:
    """Lists a profile of `steps` steps, the clock's seconds first."""
    averages = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
    rows = [(one.key[:90], one.count / steps, one.self_device_time_total / steps) for one in averages[:24]]
    return [(name, 1.0, seconds / steps * 1e6), *rows]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
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
    parser.add_argument("--tensor-parallel", type=int, default=1, help="processes that the model is split over")
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
    streams = name.removeprefix("beside")
    if streams == name or not streams.isdigit():
        return workload(name, prompt, tokens), None
    return [(_BESIDE, (_OTHERS + 1) * _APART)] * int(streams), [(_BESIDE, 2)] * _OTHERS


def record(given: argparse.Namespace, name: str, found: OfflineOutcome) -> dict[str, object]:
    about = {"device": device(), "revision": given.revision or revision(), "model": Path(given.model).name}
    return {**about, "path": "offline", "workload": name, **asdict(found)}


def command(argv: Sequence[str] | None = None) -> Result:
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
        tensor_parallel=given.tensor_parallel,
    )
    began = time.monotonic()
    runner = build(settings, lambda stage, done, total: None)
    gc.collect()
    gc.freeze()  # as an engine process does
    print(f"{Path(given.model).name}: {runner.info.decoder}, started in {time.monotonic() - began:.1f} s", flush=True)
    records, kept = [], dict[str, list[float]]()
    for wanted, sampling in itertools.product(given.workloads, given.samplings):
        name, how, budget = wanted, SAMPLINGS[sampling], runner.info.max_batch_tokens
        if sampling != "greedy":
            name += f"-{sampling}"
        if given.kv_dtype != "auto":
            name += f"-{given.kv_dtype}"
        work, beside = _work(wanted, given.prompt, given.tokens)
        rounds = [run(runner, work, budget, how, beside) for _ in range(given.rounds)]
        kept[name] = [one.output_tokens_per_second for one in rounds]
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
    rates = {name: Samples("tokens/s", tuple(values)) for name, values in kept.items()}
    return Result(
        "offline", {**vars(given), "model": Path(given.model).name}, {"loads": records}, rates, given.revision or ""
    )


def main(argv: Sequence[str] | None = None) -> int:
    return finish(command(argv))


PASS = 2048  # tokens of the largest pass
BANDWIDTH = 2.75e9  # bytes a millisecond, of keys and values
CONTEXT = 192  # tokens, at which steps of rows were measured
_ID = RowResult((5,))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Holds the measured times of steps of one model on one GPU, in ms."""

    rows: tuple[tuple[int, float], ...]  # rows → ms of a step, each row with CONTEXT tokens
    prompts: tuple[tuple[int, float], ...]  # tokens → ms of a pass
    token_bytes: int  # keys and values of one token, in all layers

    def step(self, rows: int, context: int) -> float:
        """Returns the time of rows that have `context` tokens together."""
        return _between(self.rows, rows) + (context - rows * CONTEXT) * self.token_bytes / BANDWIDTH if rows else 0.0

    def prompt(self, tokens: int) -> float:
        """Returns the time of a prompt in ms: full passes, and a smaller one at the end."""
        whole, rest = divmod(tokens, PASS)
        return whole * _between(self.prompts, PASS) + (_between(self.prompts, rest) if rest else 0.0)


def _between(known: tuple[tuple[int, float], ...], size: int) -> float:
    """Interpolates between what was measured, and extends the last line beyond it."""
    if size <= known[0][0]:
        return known[0][1]
    (low, before), (high, after) = next((pair for pair in pairwise(known) if size <= pair[1][0]), known[-2:])
    return before + (after - before) * (size - low) / (high - low)


# Measured (docs/measurements/batches-gpu.md); with plain copies of the weights predicted: products of 256 and 512 rows
# in 205 and 298 µs a layer where our own took 244 and 428, prompts at 600 TFLOP/s.
QWEN = StepTimes(
    rows=((1, 0.55), (8, 0.82), (16, 1.52), (64, 2.08), (256, 3.61), (512, 6.4)),
    prompts=((16, 1.3), (128, 1.7), (1024, 5.2), (2048, 10.5)),
    token_bytes=28 * 2 * 8 * 128 * 2,
)
MISTRAL = StepTimes(
    rows=((1, 1.8), (8, 2.55), (16, 3.04), (64, 4.58), (256, 10.4), (512, 18.9)),
    prompts=((16, 5.0), (128, 6.5), (1024, 33.0), (2048, 80.0)),
    token_bytes=32 * 2 * 8 * 128 * 2,
)
TIMES = {
    "qwen3-0.6b": QWEN,
    "mistral-7b-awq": MISTRAL,
    "mistral-7b-awq, plain copies": changed(
        MISTRAL,
        rows=((1, 1.8), (8, 2.55), (16, 3.04), (64, 4.58), (160, 7.5), (256, 9.15), (512, 14.8)),
        prompts=((16, 5.0), (128, 6.5), (1024, 26.0), (2048, 49.0)),
    ),
}


@dataclass(frozen=True, slots=True)
class Predicted:
    tokens_per_second: float
    requests_per_second: float
    first_ms_p95: float
    gap_ms_most: float  # between two tokens of a stream
    steps: int


def predict(times: StepTimes, work: Work, budget: int, most_rows: int, target: float | None = None) -> Predicted:
    """Predicts all requests at once, with pages for all of them; `target` in ms."""
    pages = sum(-(-(prompt + tokens + 16) // PAGE_SIZE) for prompt, tokens in work)
    limits = Limits(
        max_sequences=most_rows,
        max_batch_tokens=budget,
        max_context=max(prompt + tokens for prompt, tokens in work),
        target_tpot=None if target is None else target * 1e-3,
    )
    scheduler, now, steps, count = Scheduler(limits, PagePool(pages)), 0.0, 0, 0
    for key, (prompt, tokens) in enumerate(work):
        scheduler.admit(asked(key, (key + 7, *range(prompt - 1)), tokens))
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    gap = 0.0
    while (plan := scheduler.plan(now)) is not None:
        now += _taken(times, plan) * 1e-3
        steps += 1
        result = StepResult({row.key: _ID for row in plan.rows if row.sample})
        for event in scheduler.commit(plan, result, now):
            first.setdefault(event.key, now)
            gap = max(gap, now - last.get(event.key, now))
            last[event.key] = now
            count += 1
    starts = sorted(first.values())
    return Predicted(
        tokens_per_second=count / now,
        requests_per_second=len(work) / now,
        first_ms_p95=starts[int(len(starts) * 0.95) - 1] * 1e3,
        gap_ms_most=gap * 1e3,
        steps=steps,
    )


def _taken(times: StepTimes, plan: StepPlan) -> float:
    """Returns the time of a planned step in ms."""
    decoded = [row.start + 1 for row in plan.rows if row.count == 1]
    fed = sum(row.count for row in plan.rows) - len(decoded)
    return times.step(len(decoded), sum(decoded)) + times.prompt(fed)


def predict_main(argv: Sequence[str] | None = None) -> int:
    """Predicts what a workload of `bench.offline` would take from measured steps: the real scheduler over a device that
    only counts. For choices of the scheduler that would otherwise need a GPU each.

        python -m bench.offline predict --workloads n256 mixed256 short1024 --budgets 2048 8192 32768 --rows 256 512

    A step's time is its rows' (products, head, norms: by their number; attention: by the bytes of their contexts) and
    its prompts' (passes of 2,048 tokens, one after the other, with their share of attention).
    """
    parser = argparse.ArgumentParser(description=summary(predict_main))
    parser.add_argument("--models", nargs="+", choices=TIMES, default=list(TIMES))
    parser.add_argument("--workloads", nargs="+", default=["n64", "n256", "mixed256", "short1024"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[2048, 4096, 32768], help="prompt tokens a step")
    parser.add_argument("--rows", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--targets", nargs="+", type=float, default=[], help="ms between two tokens; none: no target")
    given = parser.parse_args(argv)
    for model in given.models:
        for name in given.workloads:
            for rows in given.rows:
                for budget in given.budgets:
                    for target in given.targets or [None]:
                        found = predict(TIMES[model], workload(name, 128, 128), budget, rows, target)
                        print(
                            f"{model:30} {name:>10} rows {rows:4} budget {budget:6}"
                            f"{'' if target is None else f' target {target:5.1f}'}"
                            f" {found.tokens_per_second:8.0f} tok/s {found.requests_per_second:7.1f} req/s"
                            f"  first p95 {found.first_ms_p95:8.1f} ms  gap {found.gap_ms_most:7.1f} ms"
                            f"  {found.steps} steps",
                            flush=True,
                        )
    return 0


if __name__ == "__main__":
    sys.exit(run_one_of(main, predicted=predict_main))
