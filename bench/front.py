"""Measures the front: messages and tokens a second with an engine that is faster than it, and the time from an engine
event to the client's bytes. Prints a table and ends in one JSON line.

Everything runs on this machine: the client, the front and the fake engine are three processes that share its cores.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from bench import own_server
from bench import result as about
from bench.grpc_frames import FrameClient, ReceivedStream
from bench.own_server import cpu_seconds
from bench.result import run_one_of
from engine.fake.stamps import MODULUS, stamp
from service.pb.whippet.v1 import generation_pb2 as pb

STREAM = "/whippet.v1.GenerationService/GenerateStream"
UNARY = "/whippet.v1.GenerationService/Generate"


@contextmanager
def server(*flags: str, caches: bool = False) -> Iterator[tuple[str, int]]:
    """Runs a server with the fake engine, with the default caches or none. Yields its data address and its process
    id."""
    uncached = () if caches else ("--optimizations.response-cache=false", "--cache.semantic.mode=off")
    with own_server.server(["--engine=fake", *uncached, *flags]) as running:
        yield running.address, running.pid


def request(tokens: int, per_message: int | None = 1, logprobs: int | None = None, number: int = 0) -> bytes:
    message = pb.GenerateStreamRequest(text=f"bench {number}")
    message.stopping.max_tokens = tokens
    if per_message is not None:
        message.delivery.max_tokens_per_message = per_message
    if logprobs is not None:
        message.output.logprobs = logprobs
    return message.SerializeToString()


def throughput(
    address: str, pid: int, streams: int, tokens: int, per_message: int | None, first: int = 0
) -> dict[str, float]:
    """Runs all streams at once, from the first request to the last message. `first` is the number of the first
    prompt."""
    client = FrameClient(address, time.monotonic)
    started, cpu = time.monotonic(), cpu_seconds(pid)
    for number in range(first, first + streams):
        client.start(STREAM, request(tokens, per_message, number=number))
    while client.ended < streams and client.read():
        pass
    took, used = time.monotonic() - started, cpu_seconds(pid) - cpu
    client.close()
    bad = [s.status for s in client.streams.values() if s.status != 0]
    if bad:
        raise RuntimeError(f"streams ended with {bad}")
    return {
        "messages_per_s": client.messages / took,
        "tokens_per_s": streams * tokens / took,
        "front_us_per_message": used / client.messages * 1e6,
        "front_us_per_token": used / (streams * tokens) * 1e6,
        "front_cores": used / took,
    }


def latency(address: str, tokens: int) -> list[float]:
    """Measures milliseconds from the end of an engine step to the client's bytes, one stream, one token a message."""
    found: list[float] = []

    def on_message(stream: ReceivedStream, data: bytes) -> None:
        now = stamp()
        for token in pb.GenerateStreamResponse.FromString(data).logprobs:
            found.append((now - token.top[0].token_id) % MODULUS / 1000)

    client = FrameClient(address, time.monotonic, on_message=on_message)
    client.start(STREAM, request(tokens, logprobs=1))
    while client.ended < 1 and client.read():
        pass
    client.close()
    return found


def unary(address: str, count: int) -> list[float]:
    """Measures milliseconds for a whole answer of one token, one after the other on one connection."""
    client = FrameClient(address, time.monotonic)
    message = pb.GenerateRequest(text="bench")
    message.stopping.max_tokens = 1
    found = []
    for number in range(count):
        started = time.monotonic()
        client.start(UNARY, message.SerializeToString())
        while client.ended <= number and client.read():
            pass
        found.append((time.monotonic() - started) * 1000)
    client.close()
    return found


def first_message(address: str, count: int) -> list[float]:
    """Measures milliseconds from the request to the first streamed message."""
    client = FrameClient(address, time.monotonic)
    found = []
    for number in range(count):
        started = time.monotonic()
        stream = client.streams[client.start(STREAM, request(4))]
        while client.ended <= number and client.read():
            pass
        found.append(((stream.first_at or started) - started) * 1000)
    client.close()
    return found


def together(address: str, streams: int, tokens: int) -> float:
    """Measures seconds of `streams` streams that start at once."""
    client = FrameClient(address, time.monotonic)
    started = time.monotonic()
    for number in range(streams):
        client.start(STREAM, request(tokens, number=number))
    while client.ended < streams and client.read():
        pass
    client.close()
    return time.monotonic() - started


def neighbours(address: str, rounds: int) -> dict[str, float]:
    """Measures eight streams of 200 tokens, alone and beside eight readers that never read, in turn."""
    alone, beside = [], []
    for _ in range(rounds):
        alone.append(together(address, 8, 200))
        stuck = FrameClient(address, time.monotonic, stream_window=500)
        for number in range(8):
            stuck.start(STREAM, request(190_000, number=number))
        time.sleep(2.0)  # until their buffers are full or their windows are
        beside.append(together(address, 8, 200))
        stuck.close()
        time.sleep(0.5)
    base, with_stuck = statistics.median(alone), statistics.median(beside)
    return {"alone_s": base, "beside_s": with_stuck, "slower_percent": (with_stuck / base - 1) * 100}


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": ordered[int(len(ordered) * 0.99)]}


Keep = Callable[[str, dict[str, float]], None]
SHAPES = ((1, 4000), (16, 3000), (64, 1500))  # streams and tokens of each
WIDE = ("--scheduler.max-sequences=64", "--fake.total-pages=20000")


def paths(rounds: int, keep: Keep) -> None:
    """Caches off, beside the default in one run: an answer that is generated and stored, and one that is found."""
    fresh = itertools.count(0, 100)  # numbers of prompts that were never used
    with server(*WIDE) as (plain, plain_pid), server(*WIDE, caches=True) as (address, pid):
        for _ in range(rounds):
            for streams, tokens in SHAPES:
                for size in (1, 8):
                    first, name = next(fresh), f"{streams} streams, {size} a message{', 1 a step' if size > 1 else ''}"
                    keep(name, throughput(plain, plain_pid, streams, tokens, size, first))
                    keep(f"{name}, caches miss", throughput(address, pid, streams, tokens, size, first))
                    keep(f"{name}, caches hit", throughput(address, pid, streams, tokens, size, first))


def crowd(rounds: int, keep: Keep) -> None:
    """Measures 256 streams: at the pace of an engine that makes 40,000 tokens a second, and as fast as the fake engine
    goes. Tokens that arrive while the front is busy share a message, so that a late front sends fewer of them."""
    wide = ("--scheduler.max-sequences=256", "--fake.total-pages=20000", "--limits.connection-calls=256")
    for name, pace in (("paced", ("--fake.step-time=0.0055",)), ("as fast as it goes", ())):
        with server(*wide, *pace) as (address, pid):
            for number in range(rounds):
                for size in (1, None):
                    kind = f"256 streams, {name}, {'one a message' if size else 'what came together'}"
                    keep(kind, throughput(address, pid, 256, 200, size, number * 256))


def best() -> tuple[dict[str, dict[str, float]], Keep]:
    """Returns figures by name, and a function that keeps each one's best, since the machine is shared."""
    result: dict[str, dict[str, float]] = {}

    def keep(name: str, found: dict[str, float]) -> None:
        best = result.setdefault(name, found)
        for key, value in found.items():
            best[key] = (min if key.startswith("front_") else max)(best[key], value)

    return result, keep


def measure(rounds: int) -> dict[str, dict[str, float]]:
    result, keep = best()
    paths(rounds, keep)
    with server(*WIDE, "--fake.tokens-per-step=8") as (address, pid):
        for _ in range(rounds):
            for streams, tokens in SHAPES:
                keep(f"{streams} streams, 8 a message, 8 a step", throughput(address, pid, streams, tokens, 8))
    with server() as (address, pid):
        unary(address, 50)
        cpu = cpu_seconds(pid)
        waits = quantiles(unary(address, 500))
        result["unary of one token, ms"] = {**waits, "front_us_per_call": (cpu_seconds(pid) - cpu) / 500 * 1e6}
        result["request to first message, ms"] = quantiles(first_message(address, 300))
    with server("--fake.step-time=0.005", "--fake.stamps=true") as (address, _):
        result["engine event to client bytes, ms"] = quantiles(latency(address, 1000))
    long = ("--fake.max-context=200000", "--fake.total-pages=200000", "--fake.step-time=0.005")
    with server(*long) as (address, _):
        result["neighbours of readers that never read"] = neighbours(address, rounds)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--crowd", action="store_true", help="only 256 streams at once")
    parser.add_argument("--paths", action="store_true", help="only what the caches cost")
    options = parser.parse_args()
    if options.paths or options.crowd:
        result, keep = best()
        (paths if options.paths else crowd)(options.rounds, keep)
    else:
        result = measure(options.rounds)
    for name, figures in result.items():
        print(f"{name:40} " + "  ".join(f"{key} {value:,.2f}" for key, value in figures.items()))
    sha = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    device = f"{platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({"bench": "front", "git": sha.stdout.strip(), "device": device, "figures": result}))


_EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"
_AT_ONCE = 32
SHARES = (None, 0.01, 1.0)  # None: traces are off


def collector() -> tuple[grpc.Server, str]:
    handler = grpc.unary_unary_rpc_method_handler(lambda data, context: b"")
    taking = grpc.server(ThreadPoolExecutor(1))
    taking.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_EXPORT, {"Export": handler}),))
    port = taking.add_insecure_port("127.0.0.1:0")
    taking.start()
    return taking, f"http://127.0.0.1:{port}"


def calls(address: str, pid: int, count: int) -> float:
    """Measures microseconds of the front's processor time per call, 32 at once."""
    client = FrameClient(address, time.monotonic)
    message = pb.GenerateRequest(text="bench")
    message.stopping.max_tokens = 1
    data, begun, cpu = message.SerializeToString(), 0, cpu_seconds(pid)
    while client.ended < count:
        while begun < count and begun - client.ended < _AT_ONCE:
            client.start(UNARY, data)
            begun += 1
        client.read()
    used = cpu_seconds(pid) - cpu
    client.close()
    return used / count * 1e6


def traces_measure(rounds: int, count: int) -> dict[str, list[float]]:
    """Measures each share of traced calls in rounds, and returns the rounds' figures by share."""
    found: dict[str, list[float]] = {}
    taking, endpoint = collector()
    with ExitStack() as stack:
        servers = {}
        for share in SHARES:
            flags = () if share is None else (f"--traces.endpoint={endpoint}", f"--traces.sample={share}")
            servers["off" if share is None else f"{share:g}"] = stack.enter_context(server(*WIDE, *flags))
        for number in range(rounds + 1):  # the first is for warming up
            for name, (address, pid) in servers.items():
                took = calls(address, pid, count)
                if number:
                    found.setdefault(name, []).append(took)
    taking.stop(None).wait()
    return found


def traces_main() -> None:
    """Measures what traces cost the front: processor time of a call with none, one in a hundred and all of them traced,
    in turn on three servers. Our collector accepts what it is sent and keeps nothing. Ends in one JSON line.

    A call is unary and of one token: the shortest there is, so that what a trace costs shows most.
    """
    parser = argparse.ArgumentParser(description=inspect.getdoc(traces_main))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    found = traces_measure(options.rounds, options.calls)
    best = {name: min(values) for name, values in found.items()}
    for name, value in best.items():
        print(f"{name:6} {value:7.1f} us a call  {100 * (value / best['off'] - 1):+.1f} %  (of {found[name]})")
    sha = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    device = f"{platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({"bench": "traces", "git": sha.stdout.strip(), "device": device, "us_a_call": best}))


_PLAIN = ("--engine=fake", "--optimizations.response-cache=false", "--cache.semantic.mode=off")
_WIDE = ("--scheduler.max-sequences=64", "--fake.max-context=200000", "--fake.total-pages=200000")
_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class FrontLoad:
    streams: int
    message: int  # tokens in one
    step: int  # tokens of a stream in a step of the engine
    pace: float  # seconds of a step; 0: as fast as it goes

    @property
    def name(self) -> str:
        pace = f"a step each {self.pace * 1000:g} ms" if self.pace else "as fast as it goes"
        return f"{self.streams} streams, {self.message} a message, {self.step} a step, {pace}"

    def flags(self) -> tuple[str, ...]:
        return (*_PLAIN, *_WIDE, f"--fake.tokens-per-step={self.step}", f"--fake.step-time={self.pace}")


@dataclass(frozen=True, slots=True)
class FrontTurn:
    token: float  # µs of processor time
    message: float
    rate: float  # messages a second
    size: float  # tokens a message


# A pace leaves the front idle for half of the time.
PACED = tuple(
    FrontLoad(streams, message, step, pace)
    for streams, paces in ((1, (0.0006, 0.0006)), (16, (0.002, 0.003)), (64, (0.008, 0.01)))
    for (message, step), pace in zip(((1, 1), (8, 8)), paces, strict=True)
)
FAST = tuple(FrontLoad(streams, *sizes, 0.0) for streams in (1, 16, 64) for sizes in ((1, 1), (8, 1), (8, 8)))


def processor_seconds(pid: int) -> float:
    """Returns a process's seconds so far, all of its threads: the kernel's clock for it, in nanoseconds."""
    return time.clock_gettime(~pid << 3 | 2)


def turn(server: own_server.RunningServer, shape: FrontLoad, tokens: int) -> FrontTurn:
    """Runs all streams at once. Counted from when each has begun until one ends: no call is opened or ended
    meanwhile."""
    with FrameClient(server.address, time.monotonic) as client:
        streams = [client.streams[client.start(STREAM, request(tokens, shape.message))] for _ in range(shape.streams)]
        while any(not stream.messages for stream in streams) and client.read():
            pass
        began, cpu, skipped = time.monotonic(), processor_seconds(server.pid), client.messages
        while not client.ended and client.read():
            pass
        took, used = time.monotonic() - began, processor_seconds(server.pid) - cpu
        messages = client.messages - skipped
        while client.ended < shape.streams and client.read():
            pass
        if any(stream.status != 0 for stream in streams):
            raise RuntimeError("a stream did not end well")
        size = shape.streams * tokens / client.messages
        return FrontTurn(used / messages / size * 1e6, used / messages * 1e6, messages / took, size)


def tokens_for(server: own_server.RunningServer, shape: FrontLoad, seconds: float) -> int:
    """Returns a stream's length that takes about `seconds`."""
    if shape.pace:
        return int(seconds / shape.pace) * shape.step
    trial = turn(server, shape, 1000 * shape.message)
    return max(1000 * shape.message, int(seconds * trial.rate * trial.size / shape.streams))


def pairs(before: Path, shape: FrontLoad, count: int, seconds: float) -> list[tuple[FrontTurn, FrontTurn]]:
    """Measures the other tree's turn and this one's, of a fresh server each."""
    found = []
    with contextlib.ExitStack() as stack:
        order = [("before", before), ("now", about.ROOT)]
        random.shuffle(order)
        running = {name: stack.enter_context(own_server.server(shape.flags(), tree)) for name, tree in order}
        tokens = min(tokens_for(server, shape, seconds) for server in running.values())
        for server in running.values():
            turn(server, shape, tokens)
        for _ in range(count):
            order.reverse()
            turns = {name: turn(running[name], shape, tokens) for name, _ in order}
            found.append((turns["before"], turns["now"]))
    return found


def by_median(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns the median, and the standard deviation of medians of as many drawn from them."""
    drawn = [statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(_DRAWS)]
    return statistics.median(ratios), statistics.pstdev(drawn)


def summary(found: Sequence[tuple[FrontTurn, FrontTurn]]) -> dict[str, float]:
    """Ratios with how sure they are, and this tree's own figures."""
    token, token_error = by_median([before.token / after.token for before, after in found])
    message, message_error = by_median([before.message / after.message for before, after in found])
    rate, rate_error = by_median([after.rate / before.rate for before, after in found])
    return {
        "pairs": len(found),
        "token": token,
        "token_error": token_error,
        "message": message,
        "message_error": message_error,
        "rate": rate,
        "rate_error": rate_error,
        "front_us_per_token": statistics.median(after.token for _, after in found),
        "front_us_per_message": statistics.median(after.message for _, after in found),
        "tokens_per_message": statistics.median(after.size for _, after in found),
        "tokens_per_message_before": statistics.median(before.size for before, _ in found),
    }


def line(name: str, figures: dict[str, float]) -> str:
    ratios = "  ".join(
        f"{key} {figures[key]:.3f} ±{figures[f'{key}_error']:.3f}" for key in ("token", "message", "rate")
    )
    size = f"{figures['tokens_per_message_before']:.2f} → {figures['tokens_per_message']:.2f} a message"
    return f"{name:60} {ratios}  {figures['front_us_per_message']:6.1f} µs a message  {size}"


def two_fronts_main() -> None:
    """Compares the front of this tree with another tree's, for changes of a per cent: processor time a token and a
    message with an engine of a certain pace, and rates with one as fast as it goes. Prints a table and ends in one JSON
    line.

        git worktree add ../before COMMIT && python -m bench.front two_fronts ../before

    Servers with the fake engine, a fresh pair for each round and shape, since two starts of the same server differ by
    several per cent; within a round the two take short turns, and the one that begins alternates. The figure is the
    other tree's by this one's (a rate: this one's by the other's), so that above one this tree is the better; the
    median of all pairs, and by how much that median moves when the pairs are drawn anew. Processor time is the kernel's
    count in nanoseconds of the whole front; an engine of a certain pace gives both the same work.
    """
    parser = argparse.ArgumentParser(
        description=inspect.getdoc(two_fronts_main), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="the other tree")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each server")
    parser.add_argument("--pairs", type=int, default=8, help="in a round")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn")
    parser.add_argument("--only", choices=("paced", "fast"), help="one kind of engine")
    parser.add_argument("--streams", type=int, choices=(1, 16, 64), help="one number of streams")
    options = parser.parse_args()
    kinds = {"paced": PACED, "fast": FAST}
    shapes = [shape for kind in ([options.only] if options.only else kinds) for shape in kinds[kind]]
    shapes = [shape for shape in shapes if options.streams in (None, shape.streams)]
    found: dict[str, list[tuple[FrontTurn, FrontTurn]]] = {shape.name: [] for shape in shapes}
    for _ in range(options.rounds):
        for shape in shapes:
            found[shape.name] += pairs(options.before.resolve(), shape, options.pairs, options.seconds)
            print(line(shape.name, summary(found[shape.name])), file=sys.stderr, flush=True)
    figures = {name: summary(turns) for name, turns in found.items()}
    for name, summed in figures.items():
        print(line(name, summed))
    commits = {"git": about.revision(), "before": about.revision(options.before)}
    print(json.dumps({"bench": "two_fronts", **commits, "device": about.device(), "figures": figures}))


if __name__ == "__main__":
    sys.exit(run_one_of(main, traces=traces_main, two_fronts=two_fronts_main))
