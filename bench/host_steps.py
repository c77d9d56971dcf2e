"""Measures the host's time for one step of the engine's loop (plan, run, commit) without waits for the device.

    python -m bench.host_steps --model bench/models/qwen3-0.6b --load-format dummy --rows 1 8 64 256
    python -m bench.host_steps --instant

A step counts if exactly `--rows` rows decode one token each in it; the report gives the median. A wait is one call of
`Patience.wait` in `engine.execution.patience`. Polls of the device that find no result count as host time, so each wait
is prolonged to leave few of them, and the table gives the number of waits. `--instant` runs the scheduler and the
pipelines over devices that answer at once, without torch and without a GPU, to compare two trees on one machine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from bench.about import device, revision
from bench.driven import asked
from bench.instant import LIMITS, InstantRunner
from bench.workloads import append
from engine.execution.patience import Patience
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.settings import PAGE_SIZE, DecoderChoice, Device, EngineSettings, LoadFormat
from engine.worker.build import build

_PROMPT, _TOKENS = 128, 1024
_MOST = 50  # steps for each that is counted: prompts and endings of sequences interrupt full steps
_WARM = 20  # uncounted warm-up steps for each number of rows
_WAIT = 200e-6  # seconds that are added to each wait
Run = Callable[[StepPlan], StepResult]


@dataclass(frozen=True, slots=True)
class HostTime:
    """Holds the host's time for steps that all feed the same number of rows."""

    host_us_per_step: float
    host_us_p90: float
    host_us_per_token: float  # for one token of one row
    waits_per_step: float
    wait_us_per_step: float
    tokens_per_step: float  # for one row; above 1 where steps launched ahead return together


class Waits:
    """Counts the waits for the device and sums up their seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Patches `Patience.wait` within the block, so that each wait is counted and lasts at least `_WAIT` seconds."""
        waits, own = self, Patience.wait

        def wait(self: Patience) -> None:
            began = time.perf_counter()
            own(self)
            time.sleep(_WAIT)
            waits.count += 1
            waits.seconds += time.perf_counter() - began

        Patience.wait = wait  # type: ignore[method-assign]
        try:
            yield
        finally:
            Patience.wait = own  # type: ignore[method-assign]


def measure(run: Run, limits: Limits, pages: int, rows: int, steps: int) -> HostTime:
    """Times `steps` steps in which `rows` sequences decode one token each, after `_WARM` uncounted ones."""
    scheduler, keys, waits = Scheduler(limits, PagePool(pages)), iter(range(1 << 30)), Waits()
    seen: list[tuple[float, int, int, float]] = []  # host seconds, tokens, waits, seconds of the waits
    tokens = min(_TOKENS, limits.max_context - _PROMPT - 1)
    with waits.watched():
        for _ in range(_MOST * (_WARM + steps)):
            while scheduler.live < rows:
                scheduler.admit(asked(next(keys), tuple(range(3, 3 + _PROMPT)), tokens))
            before, waited, began = waits.count, waits.seconds, time.perf_counter()
            plan = scheduler.plan(0.0)
            if plan is None:
                raise RuntimeError(f"{rows} rows find no place at once")
            events = scheduler.commit(plan, run(plan), 0.0)
            took, waited = time.perf_counter() - began, waits.seconds - waited
            if len(plan.rows) == rows and all(row.count == 1 for row in plan.rows):
                made = sum(len(event.token_ids) for event in events)
                seen.append((took - waited, made, waits.count - before, waited))
            if len(seen) == _WARM + steps:
                break
        else:
            raise RuntimeError(f"only {len(seen)} steps decoded all {rows} rows")
    for key in range(next(keys)):
        scheduler.cancel(key)
    seen = seen[_WARM:]
    host = [took for took, *_ in seen]
    tokens_each = sum(count for _, count, *_ in seen) / len(seen) / rows
    return HostTime(
        host_us_per_step=round(statistics.median(host) * 1e6, 2),
        host_us_p90=round(statistics.quantiles(host, n=10)[8] * 1e6, 2),
        host_us_per_token=round(statistics.fmean(host) / tokens_each * 1e6, 2),
        waits_per_step=round(statistics.fmean(count for _, _, count, _ in seen), 2),
        wait_us_per_step=round(statistics.fmean(waited for *_, waited in seen) * 1e6, 1),
        tokens_per_step=round(tokens_each, 3),
    )


def instant(given: argparse.Namespace) -> Iterator[tuple[int, HostTime]]:
    """Measures over devices that answer at once. Yields the fastest of `--rounds` runs: other load only adds time."""
    for rows in given.rows:
        found = []
        for _ in range(given.rounds):
            runner = InstantRunner(max(given.rows), LIMITS.max_context)
            limits = runner.limits
            found.append(measure(runner.run, limits, runner.pages, rows, given.steps))
        yield rows, min(found, key=lambda one: one.host_us_per_step)


def on_a_model(given: argparse.Namespace) -> Iterator[tuple[int, HostTime]]:
    """Measures over the runner that an engine process builds for the model. Yields the fastest of `--rounds` runs."""
    settings = EngineSettings(
        model=given.model,
        load_format=given.load_format,
        device=given.device,
        decoder=given.decoder,
        max_sequences=max(given.rows),
        max_context=-(-(_PROMPT + _TOKENS + 64) // PAGE_SIZE) * PAGE_SIZE,
    )
    runner = build(settings, lambda stage, done, total: None)
    gc.collect()
    gc.freeze()  # as an engine process does
    info = runner.info
    limits = Limits(
        max_sequences=info.max_sequences,
        max_batch_tokens=info.max_batch_tokens,
        max_context=info.max_context,
        lookahead_tokens=info.lookahead_tokens,
        max_tokens_per_row=info.max_tokens_per_row,
    )
    for rows in given.rows:
        found = [measure(runner.run, limits, info.total_pages, rows, given.steps) for _ in range(given.rounds)]
        yield rows, min(found, key=lambda one: one.host_us_per_step)
    runner.close()


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a folder; with --load-format dummy its config.json suffices")
    parser.add_argument("--instant", action="store_true", help="no model: devices that answer at once")
    parser.add_argument("--load-format", choices=get_args(LoadFormat), default="auto")
    parser.add_argument("--device", choices=get_args(Device), default="auto")
    parser.add_argument("--decoder", choices=get_args(DecoderChoice), default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=300, help="that count")
    parser.add_argument("--rounds", type=int, default=3, help="the best counts")
    parser.add_argument("--append", type=Path, help="a JSON list that gets a record for each number of rows")
    parser.add_argument("--revision", help="the commit, where git is not")
    given = parser.parse_args(argv)
    if (given.model is None) != given.instant:
        parser.error("one of --model and --instant")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    given = arguments(argv)
    model = "instant" if given.instant else Path(given.model).name
    about = {"device": device(), "revision": given.revision or revision(), "model": model, "path": "host"}
    records = []
    print(f"{model:>20} {'rows':>5} {'host µs':>9} {'p90':>9} {'a token':>9} {'waits':>7} {'tokens':>7}")
    for rows, found in (instant if given.instant else on_a_model)(given):
        records.append({**about, "workload": f"rows{rows}", **asdict(found)})
        print(
            f"{'':>20} {rows:5} {found.host_us_per_step:9.1f} {found.host_us_p90:9.1f} {found.host_us_per_token:9.1f}"
            f" {found.waits_per_step:7.2f} {found.tokens_per_step:7.3f}",
            flush=True,
        )
    if given.append is not None:
        append(given.append, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
