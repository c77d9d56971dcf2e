"""What the front costs: messages and tokens a second with an engine that is faster than it, and the time from an engine
event to the client's bytes. Prints a table and ends in one JSON line.

Everything runs on this machine: the client, the front and the fake engine are three processes that share its cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench import own_server
from bench.grpc_frames import FrameClient, Stream
from bench.own_server import cpu_seconds
from engine.fake.stamps import MODULUS, stamp
from service.pb.whippet.v1 import generation_pb2 as pb

STREAM = "/whippet.v1.GenerationService/GenerateStream"
UNARY = "/whippet.v1.GenerationService/Generate"


@contextmanager
def server(*flags: str, caches: bool = False) -> Iterator[tuple[str, int]]:
    """A server with the fake engine, with the caches that are the default or without any. Gives its data address and
    its process id."""
    uncached = () if caches else ("--optimizations.response-cache=false", "--cache.semantic.mode=off")
    with own_server.server(["--engine=fake", *uncached, *flags]) as running:
        yield running.address, running.pid


def request(tokens: int, per_message: int | None = 1, logprobs: int | None = None, number: int = 0) -> bytes:
    """A streamed answer of exactly so many tokens."""
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
    """All streams at once, from the first request to the last message. `first` is the number of the first prompt."""
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
    """Milliseconds from the end of an engine step to the client's bytes, one stream, one token a message."""
    found: list[float] = []

    def on_message(stream: Stream, data: bytes) -> None:
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
    """Milliseconds for a whole answer of one token, one after the other on one connection."""
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
    """Milliseconds from the request to the first streamed message."""
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
    """Seconds that so many streams take that start at once."""
    client = FrameClient(address, time.monotonic)
    started = time.monotonic()
    for number in range(streams):
        client.start(STREAM, request(tokens, number=number))
    while client.ended < streams and client.read():
        pass
    client.close()
    return time.monotonic() - started


def neighbours(address: str, rounds: int) -> dict[str, float]:
    """Eight streams of 200 tokens, alone and beside eight readers that never read, in turn."""
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
    """Median and tail."""
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
    """256 streams: at the pace of an engine that makes 40,000 tokens a second, and as fast as the fake engine goes.
    What arrives while the front is busy goes into one message, so that a front that is late sends fewer of them."""
    wide = ("--scheduler.max-sequences=256", "--fake.total-pages=20000", "--limits.connection-calls=256")
    for name, pace in (("paced", ("--fake.step-time=0.0055",)), ("as fast as it goes", ())):
        with server(*wide, *pace) as (address, pid):
            for number in range(rounds):
                for size in (1, None):
                    kind = f"256 streams, {name}, {'one a message' if size else 'what came together'}"
                    keep(kind, throughput(address, pid, 256, 200, size, number * 256))


def best() -> tuple[dict[str, dict[str, float]], Keep]:
    """Figures by name, and what to give them to: the machine is not ours alone, so the best of several counts."""
    result: dict[str, dict[str, float]] = {}

    def keep(name: str, found: dict[str, float]) -> None:
        best = result.setdefault(name, found)
        for key, value in found.items():
            best[key] = (min if key.startswith("front_") else max)(best[key], value)

    return result, keep


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Everything, kinds interleaved."""
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
    """Entry point."""
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


if __name__ == "__main__":
    main()
