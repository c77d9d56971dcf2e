"""Measures the host's time for one step of the engine's loop (plan, run, commit) without waits for the device.

    python -m bench.host_steps --model bench/models/qwen3-0.6b --load-format dummy --rows 1 8 64 256
    python -m bench.host_steps --instant

A step counts if exactly `--rows` rows decode one token each in it; the report gives the median. A wait is one call of
`engine.execution.poller.RingPoller.wait`. Polls of the device that find no result count as host time, so each wait is
prolonged to leave few of them, and the table gives the number of waits. `--instant` runs the scheduler, the router and
the pipelines over devices that answer at once, without a GPU, to compare two trees on one machine.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from msgspec.structs import replace

from bench.pace import asked
from bench.result import ROOT, Result, Samples, device, revision, run_one_of, summary
from bench.workloads import append
from engine.api import GREEDY, ModelInfo
from engine.errors import EngineFailed
from engine.execution.batch_pipeline import BatchPipeline, Changes
from engine.execution.graphs.batch import BUCKETS, Batched
from engine.execution.graphs.decode import GraphDecode
from engine.execution.pipeline import MorePages, Pipeline, Rewrite, StepLaunch, in_flight, run_share
from engine.execution.poller import RingPoller
from engine.execution.router import ALL_OPTIONS, FEW, Capacity, Executors, Role, Router
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Assignment, Row, RowResult, Runner, StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_state import SequenceTable
from engine.settings import PAGE_SIZE, DecoderChoice, Device, EngineSettings, LoadFormat
from engine.worker.build import build
from engine.worker.recording import MOST_STEPS, StepRecorder

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
    def counted(self) -> Iterator[None]:
        """Patches `RingPoller.wait` within the block: each wait is counted and lasts at least `_WAIT` seconds."""
        waits, own = self, RingPoller.wait

        def wait(self: RingPoller) -> None:
            began = time.perf_counter()
            own(self)
            time.sleep(_WAIT)
            waits.count += 1
            waits.seconds += time.perf_counter() - began

        RingPoller.wait = wait  # type: ignore[method-assign]
        try:
            yield
        finally:
            RingPoller.wait = own  # type: ignore[method-assign]


def measure(run: Run, limits: Limits, pages: int, rows: int, steps: int) -> HostTime:
    """Times `steps` steps in which `rows` sequences decode one token each, after `_WARM` uncounted ones."""
    scheduler, keys, waits = Scheduler(limits, PagePool(pages)), iter(range(1 << 30)), Waits()
    seen: list[tuple[float, int, int, float]] = []  # host seconds, tokens, waits, seconds of the waits
    tokens = min(_TOKENS, limits.max_context - _PROMPT - 1)
    with waits.counted():
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
    runner = _built(given)
    info, limits = runner.info, limits_of(runner.info)
    for rows in given.rows:
        found = [measure(runner.run, limits, info.total_pages, rows, given.steps) for _ in range(given.rounds)]
        yield rows, min(found, key=lambda one: one.host_us_per_step)
    runner.close()


def _built(given: argparse.Namespace, speculation: bool = True) -> Any:
    settings = EngineSettings(
        model=given.model,
        load_format=given.load_format,
        device=given.device,
        decoder=given.decoder,
        max_sequences=max(given.rows),
        max_context=-(-(_PROMPT + _TOKENS + 64) // PAGE_SIZE) * PAGE_SIZE,
        speculation=speculation,
    )
    runner = build(settings, lambda stage, done, total: None)
    gc.collect()
    gc.freeze()  # as an engine process does
    return runner


def limits_of(info: ModelInfo) -> Limits:
    return Limits(
        max_sequences=info.max_sequences,
        max_batch_tokens=info.max_batch_tokens,
        max_context=info.max_context,
        lookahead_tokens=info.lookahead_tokens,
        max_tokens_per_row=info.max_tokens_per_row,
    )


def arguments(argv: Items[str] | None) -> argparse.Namespace:
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


def main(argv: Items[str] | None = None) -> int:
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


TOKEN = 5
LIMITS = Limits(
    max_sequences=256,
    max_batch_tokens=8192,
    max_context=1216,
    lookahead_tokens=max(GraphDecode.lookahead_tokens, Batched.lookahead_tokens),
    max_tokens_per_row=max(GraphDecode.max_tokens_per_row, Batched.max_tokens_per_row),
)


class InstantSteps:
    """A `pipeline.RowDevice` that answers at once."""

    def __init__(self) -> None:
        self._last = 0  # number of the last step that was launched

    def update(self, update: Rewrite | MorePages) -> None:
        if isinstance(update, Rewrite):
            self._last = update.number

    def launch(self, launch: StepLaunch) -> None:
        self._last += launch.steps

    def poll(self, index: int, number: int) -> int | None:
        return TOKEN if number <= self._last else None

    def wait(self) -> None:
        raise EngineFailed("nothing is in flight")


class InstantBatches:
    """A `batch_pipeline.BatchDevice` that answers at once."""

    def __init__(self) -> None:
        self._launched = 0

    def update(self, update: Changes) -> None:
        """Ignores row changes: this device keeps no row state."""

    def launch(self, launch: StepLaunch) -> None:
        self._launched += 1

    def poll(self, number: int, rows: int) -> Items[int] | None:
        return (TOKEN,) * rows if number <= self._launched else None

    def wait(self) -> None:
        raise EngineFailed("nothing is in flight")


class InstantRunner:
    """Runs steps as the model's runner does, but does not apply constraints."""

    def __init__(self, max_sequences: int, max_context: int) -> None:
        self._sequences = SequenceTable()
        self.limits = Limits(
            max_sequences=max_sequences,
            max_batch_tokens=LIMITS.max_batch_tokens,
            max_context=max_context,
            lookahead_tokens=LIMITS.lookahead_tokens,
            max_tokens_per_row=LIMITS.max_tokens_per_row,
        )
        self.pages = max_sequences * -(-max_context // PAGE_SIZE)
        self._few = [Pipeline(InstantSteps(), self._sequences, max_context) for _ in range(2)]
        self._many = BatchPipeline(InstantBatches(), self._sequences, max_context, BUCKETS)
        capacity = Capacity(few=2, many=BUCKETS[-1] if max_sequences > FEW else 0)
        self._router = Router(self._sequences, capacity, Executors({Role.FEW: self}))

    def in_flight(self, rows: tuple[Row, ...]) -> dict[int, int]:
        return in_flight(self._few, rows)

    def run(self, plan: StepPlan, assignment: Assignment | None = None) -> StepResult:
        self._sequences.apply(plan)
        assignment = self._router.assign(plan, ALL_OPTIONS)
        results: dict[int, RowResult] = {}
        for share in assignment.shares:
            if share.executor == Role.FEW:
                results |= run_share(self._few[share.pipeline], share, ALL_OPTIONS)
            elif share.executor == Role.MANY:
                results |= self._many.step(share.rows)
            else:
                results |= {row.key: RowResult((TOKEN,)) for row in share.rows if row.sample}
        self._sequences.append(plan.rows, results)
        return StepResult(results, assignment)


KINDS = (
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=1),
    GREEDY,
    replace(GREEDY, temperature=0.7, top_k=40, top_p=0.9, seed=2),
    replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.3),
    replace(GREEDY, logit_bias=((7, 2.0), (9, -50.0))),
)
_PROMPTS = (1, 15, 16, 17, 40, 200)  # tokens
_CONTEXT = 512


def arrivals(vocabulary: int, greedy: bool) -> Iterator[tuple[int, Sequence]]:
    """Yields the step of each arrival and its sequence: at first one sequence runs, then many, at the end one again."""
    chance = random.Random(7)
    for key in range(40):
        step = 0 if key == 0 else 20 + 2 * key if key < 4 else 60 + key if key < 30 else 150 + 4 * (key - 30)
        prompt = tuple(chance.randrange(3, vocabulary) for _ in range(_PROMPTS[key % len(_PROMPTS)]))
        one = asked(key, prompt, 20 + 5 * (key % 17), GREEDY if greedy else KINDS[key % len(KINDS)])
        if key % 11 == 5:
            one.request = replace(one.request, logprobs=2)
        if key % 13 == 6:
            one.request = replace(one.request, prompt_logprobs=1)
        yield step, one


def record(runner: Runner, recorder: StepRecorder, steps: int, *, greedy: bool) -> Path | None:
    """Runs up to `steps` steps and returns the path of their recording."""
    info = runner.info
    pages = min(info.total_pages, 160)  # few enough that some sequences are preempted
    limits = Limits(
        max_sequences=info.max_sequences,
        max_batch_tokens=64,
        max_context=min(info.max_context, _CONTEXT),
        lookahead_tokens=info.lookahead_tokens,
        max_tokens_per_row=info.max_tokens_per_row,
    )
    scheduler, waiting = Scheduler(limits, PagePool(pages)), list(arrivals(info.vocab_size, greedy))
    for number in range(steps):
        while waiting and waiting[0][0] <= number:
            scheduler.admit(waiting.pop(0)[1])
        plan = scheduler.plan(0.0)
        if plan is None:
            continue
        result = runner.run(plan)
        scheduler.commit(plan, result, 0.0)
        recorder.add(plan, result)
    return recorder.write(EngineFailed("recorded to be done again"))


@dataclass(frozen=True, slots=True)
class StepMicroseconds:
    """Microseconds of each step: the planner, the runner, and the commit."""

    plan: list[float]
    run: list[float]
    commit: list[float]


def parts_of(run: Run, limits: Limits, pages: int, rows: int, steps: int) -> StepMicroseconds:
    """Times steps in which `rows` sequences decode one token each, after `_WARM` uncounted ones."""
    scheduler, keys, found = Scheduler(limits, PagePool(pages)), iter(range(1 << 30)), StepMicroseconds([], [], [])
    tokens = min(_TOKENS, limits.max_context - _PROMPT - 1)
    for _ in range(_MOST * (_WARM + steps)):
        while scheduler.live < rows:
            scheduler.admit(asked(next(keys), tuple(range(3, 3 + _PROMPT)), tokens))
        marks = [time.perf_counter()]
        plan = scheduler.plan(0.0)
        assert plan is not None
        marks.append(time.perf_counter())
        result = run(plan)
        marks.append(time.perf_counter())
        scheduler.commit(plan, result, 0.0)
        marks.append(time.perf_counter())
        if len(plan.rows) == rows and all(row.count == 1 for row in plan.rows):
            for held, before, after in zip((found.plan, found.run, found.commit), marks, marks[1:], strict=False):
                held.append((after - before) * 1e6)
        if len(found.run) == _WARM + steps:
            break
    return StepMicroseconds(*(held[_WARM:] for held in (found.plan, found.run, found.commit)))


def operations(run: Callable[[], object], device: str, most: int = 12) -> list[tuple[str, float, float]]:
    """Profiles torch: name, share, calls. Our own C's time appears as the rest."""
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if device.startswith("cuda") else ProfilerActivity.CPU
    began = time.perf_counter()
    with profile(activities=[kind]) as seen:
        run()
    whole = (time.perf_counter() - began) * 1e6
    cuda = device.startswith("cuda")
    averages: Any = seen
    each = [
        (one.key[:60], (one.self_device_time_total if cuda else one.self_cpu_time_total) / whole, float(one.count))
        for one in averages.key_averages()
    ]
    found = sorted(each, key=lambda one: -one[1])[:most]
    return [*found, ("the rest: code of our own, and waits", 1.0 - sum(share for _, share, _ in each), 1.0)]


def command(argv: Items[str] | None = None) -> Result:
    """Measures where a step's microseconds go: planner, runner and commit, and within the runner torch's operations."""
    parser = argparse.ArgumentParser(prog="whippet bench steps", description=summary(command))
    parser.add_argument("--model", default=str(ROOT / "models" / "demo"), help="a folder or a GGUF file")
    parser.add_argument("--load-format", choices=get_args(LoadFormat), default="auto")
    parser.add_argument("--device", choices=get_args(Device), default="auto")
    parser.add_argument("--decoder", choices=get_args(DecoderChoice), default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=100, help="that count")
    given = parser.parse_args(argv)
    runner = _built(given, speculation=False)
    info, rows_found, samples = runner.info, dict[str, Any](), dict[str, Samples]()
    for rows in given.rows:
        found = parts_of(runner.run, limits_of(info), info.total_pages, rows, given.steps)
        row = {name: round(statistics.median(getattr(found, name)), 1) for name in ("plan", "run", "commit")}
        rows_found[str(rows)] = row
        print(f"{rows:4} rows: " + ", ".join(f"{name} {value} µs" for name, value in row.items()), flush=True)
        for name in ("plan", "run", "commit"):
            samples[f"{rows} rows, {name}"] = Samples("µs", tuple(round(one, 2) for one in getattr(found, name)))
    inside = operations(lambda: parts_of(runner.run, limits_of(info), info.total_pages, given.rows[0], 20), info.device)
    for name, share, calls in inside:
        print(f"{share:7.1%} {calls:8.0f} × {name}")
    runner.close()
    figures = {"rows": rows_found, "operations": inside, "decoder": info.decoder, "weights": info.weight_format}
    return Result("steps", {**vars(given), "model": Path(given.model).name}, figures, samples)


def plans_main(argv: Items[str] | None = None) -> int:
    """Records steps for `engine.worker.replay`: the plans that a runner receives and the results that it returns.

        python -m bench.host_steps plans --model models/demo --device cpu --out plans.msgpack
        python -m engine.worker.replay plans.msgpack --model models/demo --device cpu

    Requests with every kind of sampling arrive one after another and end at different times. The steps therefore have
    few and many rows, chunks of prompts beside rows that decode, log-probabilities, and rows that are preempted and
    lose their pages. Two trees that return the same token ids can replay each other's recordings.
    """
    parser = argparse.ArgumentParser(description=plans_main.__doc__.splitlines()[0] if plans_main.__doc__ else None)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", choices=get_args(LoadFormat), default="auto")
    parser.add_argument("--device", choices=get_args(Device), default="auto")
    parser.add_argument("--decoder", choices=get_args(DecoderChoice), default="auto")
    parser.add_argument("--steps", type=int, default=MOST_STEPS)
    parser.add_argument("--greedy", action="store_true", help="every request, whatever else it asks for")
    parser.add_argument("--out", type=Path, required=True, help="the file")
    given = parser.parse_args(argv)
    settings = EngineSettings(
        model=given.model,
        load_format=given.load_format,
        device=given.device,
        decoder=given.decoder,
        max_sequences=24,
        max_context=_CONTEXT,
        threads=1,
    )
    runner = build(settings, lambda stage, done, total: None)
    recorder = StepRecorder(settings, runner.info, runner.pages.layout.token_bytes * PAGE_SIZE, given.out.parent)
    path = record(runner, recorder, given.steps, greedy=given.greedy)
    runner.close()
    if path is None:
        return 1
    path.rename(given.out)
    print(f"{given.steps} steps at most in {given.out}, {given.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(run_one_of(main, plans=plans_main))
