"""What a workload of `bench.offline` would take, from what steps were measured to take: the real scheduler over a
device that only counts. For choices of the scheduler that would otherwise need a GPU each.

    python -m bench.foretold --workloads n256 mixed256 short1024 --budgets 2048 8192 32768 --rows 256 512

A step's time is its rows' (products, head, norms: by their number; attention: by the bytes of their contexts) and its
prompts' (passes of 2,048 tokens, one after the other, with their share of attention).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bench.driven import asked
from bench.workloads import Work, workload
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.plan import RowResult, StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.settings import PAGE_SIZE

PASS = 2048  # tokens of the largest pass
BANDWIDTH = 2.75e9  # bytes a millisecond, of keys and values
CONTEXT = 192  # tokens, at which steps of rows were measured
_ID = RowResult((5,))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of one model on one GPU, in ms."""

    rows: tuple[tuple[int, float], ...]  # of a step of so many rows, each with CONTEXT tokens
    prompts: tuple[tuple[int, float], ...]  # of a pass of so many tokens
    token_bytes: int  # keys and values of one token, in all layers

    def step(self, rows: int, context: int) -> float:
        """Rows that have so many tokens together."""
        return _between(self.rows, rows) + (context - rows * CONTEXT) * self.token_bytes / BANDWIDTH if rows else 0.0

    def prompt(self, tokens: int) -> float:
        """In passes, the last of them smaller."""
        whole, rest = divmod(tokens, PASS)
        return whole * _between(self.prompts, PASS) + (_between(self.prompts, rest) if rest else 0.0)


def _between(known: tuple[tuple[int, float], ...], size: int) -> float:
    """By straight lines between what is known, and on beyond it."""
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
    "mistral-7b-awq, plain copies": replace(
        MISTRAL,
        rows=((1, 1.8), (8, 2.55), (16, 3.04), (64, 4.58), (160, 7.5), (256, 9.15), (512, 14.8)),
        prompts=((16, 5.0), (128, 6.5), (1024, 26.0), (2048, 49.0)),
    ),
}


@dataclass(frozen=True, slots=True)
class Foretold:
    """Of one workload."""

    tokens_per_second: float
    requests_per_second: float
    first_ms_p95: float
    gap_ms_most: float  # between two tokens of a stream
    steps: int


def foretell(times: StepTimes, work: Work, budget: int, most_rows: int, target: float | None = None) -> Foretold:
    """All requests at once, with pages for all of them; `target` in ms."""
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
    return Foretold(
        tokens_per_second=count / now,
        requests_per_second=len(work) / now,
        first_ms_p95=starts[int(len(starts) * 0.95) - 1] * 1e3,
        gap_ms_most=gap * 1e3,
        steps=steps,
    )


def _taken(times: StepTimes, plan: StepPlan) -> float:
    """ms."""
    decoded = [row.start + 1 for row in plan.rows if row.count == 1]
    fed = sum(row.count for row in plan.rows) - len(decoded)
    return times.step(len(decoded), sum(decoded)) + times.prompt(fed)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
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
                        found = foretell(TIMES[model], workload(name, 128, 128), budget, rows, target)
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
    sys.exit(main())
