"""Loads a server over gRPC streams: rates, latencies, refusals, and that each accepted stream ends once.

    python -m bench.serve --model bench/models/qwen3-0.6b --load-format=dummy --workloads n1 n64 n256 mixed256
    python -m bench.serve --target localhost:50051 --rate 5,10,20 --seconds 60 --plot found.svg

Starts a server of its own, which gets all flags that are not ours, or calls one that runs. `--workloads` are those of
`bench.workloads`, all requests at once; `--concurrency` that many streams, each asking again when it was answered;
`--rate` Poisson arrivals, and a first token's time counts from when its request was due; `--trace` a block trace at its
own times. The gates: `--overload 5` asks five times the peak measured just before; `--interactive` runs one stream
alone and beside a flood of background ones. Callers are processes of their own, whose use of the processor is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import msgspec

from bench.own_server import RunningServer, served_model, server, with_tokenizer
from bench.report import Chart, standalone
from bench.result import Result, device, finish, revision
from bench.serving.caller import Crew, crew, soon
from bench.serving.jobs import LoadJob, LoadOutcome, LoadRequest, machine_counters, outcome, shared_out
from bench.workloads import Source, append, counts, of_trace, of_workload, poisson, rates, read_prompts
from engine.settings import LoadFormat
from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1 import model_pb2

_SETTLING = 5.0  # seconds of a timed load that do not count, a fifth of it at most
_PEAK = 3.0, 20.0  # seconds at least and at most in which the peak is looked for; between them a quarter of the load's


@dataclass(slots=True)
class ServeBench:
    crew: Crew
    server: RunningServer | None
    model: model_pb2.Model
    given: argparse.Namespace
    source: Source
    about: dict[str, object]  # of every record
    found: list[tuple[str, LoadOutcome]] = field(default_factory=list)

    def job(self, requests: list[LoadRequest], streams: int, seconds: float | None = None, **fields: Any) -> LoadJob:
        """Makes a job that begins soon; with `seconds`, repeated until then."""
        begin = soon()
        vocabulary = self.model.limits.vocab_size
        return LoadJob(begin, requests, streams, None if seconds is None else begin + seconds, vocabulary, **fields)

    def once(self, requests: list[LoadRequest], streams: int) -> LoadOutcome:
        """Runs each request once, at most `streams` at a time; 0: each at its own time."""
        with machine_counters(self.server) as seen:
            job = self.job(requests, streams)
            parts = self.crew.run(job)
        return outcome(parts, job.begin, seen)

    def closed(self, streams: int, seconds: float) -> LoadOutcome:
        """Runs `streams` streams, each asking again when it was answered."""
        with machine_counters(self.server) as seen:
            job = self.job(self.source.take(max(streams, len(self.source.read))), streams, seconds)
            parts = self.crew.run(job)
        return outcome(parts, job.begin, seen, _window(seconds))

    def open(self, rate: float, seconds: float) -> LoadOutcome:
        """Sends `rate` requests a second, whatever becomes of earlier ones."""
        with machine_counters(self.server) as seen:
            job = self.job(poisson(rate, seconds, self.source, self.given.seed), 0)
            parts = self.crew.run(job)
        return outcome(parts, job.begin, seen, _window(seconds))

    @property
    def records(self) -> list[dict[str, object]]:
        return [{**self.about, "workload": load, **found.record()} for load, found in self.found]

    def keep(self, name: str, found: LoadOutcome, **extra: object) -> None:
        """Prints and saves a load at once, so that an interrupted run keeps what it had."""
        found = replace(found, extra=extra)
        self.found.append((name, found))
        if self.given.append is not None:
            append(self.given.append, self.records[-1:])
        refused = f"  {found.refused} refused, p99 {found.refusal_ms['p99']:.1f} ms" if found.refused else ""
        suffix = "".join(f"  {key} {value}" for key, value in extra.items())
        print(
            f"{name:>12} {found.output_tokens_per_second:10.1f} tok/s {found.requests_per_second:8.2f} req/s"
            f"  first token p95 {found.ttft_ms.get('p95', 0):.1f} ms, a token p95 {found.tpot_ms.get('p95', 0):.2f} ms"
            f"  {found.tokens_a_message:.2f} a message  cores: front {found.front_cores}, relays {found.relay_cores},"
            f" callers {found.client_cores}"
            f"  GPU {found.gpu_percent} %  {found.errors} errors {found.errors_by_status or ''}{refused}"
            f"  not ended once: {found.accepted_not_ended_once}{suffix}",
            flush=True,
        )


def _window(seconds: float) -> tuple[float, float]:
    return min(_SETTLING, round(seconds / 5, 1)), seconds


def workloads(bench: ServeBench) -> None:
    """Keeps the best of --rounds by rate; faults of any round count."""
    given = bench.given
    for name in given.workloads:
        requests = of_workload(name, given.prompt, given.tokens)
        rounds = [bench.once(requests, len(requests)) for _ in range(given.rounds)]
        best = max(rounds, key=lambda one: one.output_tokens_per_second)
        wrong = sum(one.accepted_not_ended_once for one in rounds)
        bench.keep(name, replace(best, errors=sum(one.errors for one in rounds), accepted_not_ended_once=wrong))


def trace(bench: ServeBench) -> None:
    """Replays at the trace's own times, or --speed times as fast."""
    given = bench.given
    requests, long = of_trace(given.trace, given.speed, given.limit, bench.model.limits.max_context_tokens)
    bench.keep(f"trace {given.trace.name}", bench.once(requests, 0), speed=given.speed, too_long=long)


def overload(bench: ServeBench) -> None:
    """Sends a multiple of the peak, which is measured first with as many streams as run at once."""
    given, slots = bench.given, bench.model.limits.max_sequences
    peak = bench.closed(slots, min(max(_PEAK[0], given.seconds / 4), _PEAK[1]))
    bench.keep(f"c{slots}", peak)
    if not peak.output_tokens_per_second:
        raise RuntimeError("no token came while the peak was looked for")
    # By tokens: streams that began together end together, and how many of them did within a window is chance.
    asked = bench.source.take(slots)
    rate = peak.output_tokens_per_second * len(asked) / sum(request.tokens for request in asked)
    found = bench.open(given.overload * rate, given.seconds)
    share = found.output_tokens_per_second / peak.output_tokens_per_second
    bench.keep(f"overload{given.overload:g}", found, of_peak=round(share, 4))


def interactive(bench: ServeBench) -> None:
    """Runs one stream alone, then beside twice as many background streams as run at once, which began before it."""
    seconds, slots = bench.given.seconds, bench.model.limits.max_sequences
    ahead, window = _window(seconds)[0], _window(seconds)
    one = bench.source.take(1)
    with machine_counters(bench.server) as seen:
        lonely = bench.job(one, 1, seconds, priority=pb.PRIORITY_INTERACTIVE)
        parts = bench.crew.together([lonely])
    alone = outcome(parts, lonely.begin, seen, window)
    with machine_counters(bench.server) as seen:
        crowd = bench.job(bench.source.take(2 * slots), 2 * slots, ahead + seconds, priority=pb.PRIORITY_BACKGROUND)
        amid = msgspec.structs.replace(lonely, begin=crowd.begin + ahead, until=crowd.until)
        parts = bench.crew.together([amid, *shared_out(crowd, len(bench.crew) - 1)])
    beside = outcome(parts[:1], amid.begin, seen, window)
    bench.keep("alone", alone)
    bench.keep("background", outcome(parts[1:], crowd.begin, seen, window))
    before, after = alone.tpot_ms.get("p95"), beside.tpot_ms.get("p95")
    bench.keep("beside", beside, tpot_p95_of_alone=round(after / before, 3) if before and after else None)


@contextmanager
def opened(given: argparse.Namespace, flags: list[str]) -> Iterator[ServeBench]:
    """Yields the server of --target or one of ours, and callers that have called it."""
    suffix: dict[str, object] = {"flags": flags} if flags else {}
    with ExitStack() as stack:
        running = None
        if given.target is None:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            if given.model is not None:
                folder = with_tokenizer(Path(given.model).resolve(), scratch / "model")
                flags = [f"--model={folder}", f"--load-format={given.load_format}", *flags]
            most = max((len(of_workload(name, 1, 1)) for name in given.workloads), default=0)
            if most > 256 and not any(flag.startswith("--limits.queued-requests") for flag in flags):
                flags = [*flags, f"--limits.queued-requests={most}"]
            running = stack.enter_context(server(flags))
            print(f"the server was ready after {running.seconds:.1f} s", flush=True)
        address = running.address if running is not None else given.target
        model = served_model(address, given.token)
        read = () if given.prompts is None else read_prompts(given.prompts, given.tokens)
        callers = stack.enter_context(crew(address, given.token, given.processes))
        callers.warm(model.limits.vocab_size)
        name = Path(given.model).name if given.model else model.name
        about = {"device": device(), "revision": given.revision or revision(), "model": name, "path": "grpc"}
        yield ServeBench(callers, running, model, given, Source(given.prompt, given.tokens, read), {**about, **suffix})


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--target", metavar="HOST:PORT", help="a server that runs; default: one is started")
    parser.add_argument("--token", default="", help="of a caller of that server")
    parser.add_argument("--model", help="a folder; with --load-format=dummy its config.json suffices")
    parser.add_argument("--load-format", choices=get_args(LoadFormat), default="auto")
    parser.add_argument("--workloads", nargs="+", default=[], metavar="NAME", help="n1 … n256, mixed256, short1024")
    parser.add_argument("--concurrency", type=counts, default=[], metavar="N,…", help="streams at once")
    parser.add_argument("--rate", type=rates, default=[], metavar="R,…", help="requests a second")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="prompts as blocks, Mooncake's format")
    parser.add_argument("--speed", type=float, default=1.0, help="of a trace")
    parser.add_argument("--limit", type=int, metavar="COUNT", help="requests of a trace")
    parser.add_argument("--overload", type=float, metavar="TIMES", help="this multiple of the peak")
    parser.add_argument("--interactive", action="store_true", help="one stream alone and beside a background flood")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a text a line, or objects with text, max_tokens")
    parser.add_argument("--prompt", type=int, default=128, help="tokens in, by default")
    parser.add_argument("--tokens", type=int, default=128, help="tokens out, likewise")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a load that is timed")
    parser.add_argument("--rounds", type=int, default=2, help="of each workload; the best counts")
    parser.add_argument("--processes", type=int, default=max(2, min(6, (os.cpu_count() or 1) // 3)), help="of callers")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals")
    parser.add_argument("--append", type=Path, help="a JSON list that gets a record a load, at once")
    parser.add_argument("--plot", type=Path, help="an SVG of the loads in this run")
    parser.add_argument("--revision", help="the commit, where git is not")
    given, flags = parser.parse_known_args(argv)
    if given.processes < 2:
        parser.error("--processes must be at least 2")
    if given.target is not None and flags:
        parser.error(f"a server that runs takes no flags: {' '.join(flags)}")
    return given, flags


def plot(path: Path, title: str, found: Sequence[tuple[str, LoadOutcome]]) -> None:
    def lines(of: Callable[[LoadOutcome], dict[str, float]]) -> dict[str, list[float | None]]:
        return {share: [of(one).get(share, 0.0) for _, one in found] for share in ("p50", "p95", "p99")}

    names = [name for name, _ in found]
    charts = [
        Chart("output tokens", "tokens/s", names, {"tokens/s": [one.output_tokens_per_second for _, one in found]}),
        Chart("first token", "ms", names, lines(lambda one: one.ttft_ms)),
        Chart("a token", "ms", names, lines(lambda one: one.tpot_ms)),
    ]
    path.write_text(standalone(title, charts))


def command(argv: Sequence[str] | None = None) -> tuple[Result, int]:
    """Measures and prints. The code is 1 where an accepted stream did not end exactly once."""
    given, flags = arguments(argv)
    with opened(given, flags) as bench:
        workloads(bench)
        for streams in given.concurrency:
            bench.keep(f"c{streams}", bench.closed(streams, given.seconds))
        for rate in given.rate:
            bench.keep(f"rate{rate:g}", bench.open(rate, given.seconds))
        if given.trace is not None:
            trace(bench)
        if given.overload is not None:
            overload(bench)
        if given.interactive:
            interactive(bench)
    if given.plot is not None:
        plot(given.plot, f"{bench.about['model']}, {bench.about['device']}", bench.found)
    asked = {name: value for name, value in vars(given).items() if name != "token"}
    result = Result(
        "serve", {**asked, "model": bench.about["model"]}, {"loads": bench.records}, revision=given.revision or ""
    )
    return result, 1 if any(found.accepted_not_ended_once for _, found in bench.found) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints. 1 where an accepted stream did not end exactly once."""
    result, code = command(argv)
    finish(result)
    return code


if __name__ == "__main__":
    sys.exit(main())
