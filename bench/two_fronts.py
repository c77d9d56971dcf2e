"""The front of this tree beside another tree's, for changes of a per cent: processor time a token and a message with an
engine of a certain pace, and rates with one as fast as it goes. Prints a table and ends in one JSON line.

    git worktree add ../before COMMIT && python -m bench.two_fronts ../before

Servers with the fake engine, a fresh pair for each round and shape, since two starts of the same server differ by
several per cent; within a round the two take short turns, and the one that begins alternates. The figure is the other
tree's by this one's (a rate: this one's by the other's), so that above one this tree is the better; the median of all
pairs, and by how much that median moves when the pairs are drawn anew. Processor time is the kernel's count in
nanoseconds of the whole front; an engine of a certain pace gives both the same work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import about, own_server
from bench.front import STREAM, request
from bench.grpc_frames import FrameClient

_PLAIN = ("--engine=fake", "--optimizations.response-cache=false", "--cache.semantic.mode=off")
_WIDE = ("--scheduler.max-sequences=64", "--fake.max-context=200000", "--fake.total-pages=200000")
_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Shape:
    """What is asked of a front at a time."""

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
class Turn:
    """What one front did in one turn."""

    token: float  # µs of processor time
    message: float
    rate: float  # messages a second
    size: float  # tokens a message


# A pace leaves the front idle for half of the time.
PACED = tuple(
    Shape(streams, message, step, pace)
    for streams, paces in ((1, (0.0006, 0.0006)), (16, (0.002, 0.003)), (64, (0.008, 0.01)))
    for (message, step), pace in zip(((1, 1), (8, 8)), paces, strict=True)
)
FAST = tuple(Shape(streams, *sizes, 0.0) for streams in (1, 16, 64) for sizes in ((1, 1), (8, 1), (8, 8)))


def processor_seconds(pid: int) -> float:
    """Of a process so far, all of its threads: the kernel's clock for it, in nanoseconds."""
    return time.clock_gettime(~pid << 3 | 2)


def turn(server: own_server.Server, shape: Shape, tokens: int) -> Turn:
    """All streams at once. Counted is from when each has begun until one ends: no call is opened or ended meanwhile."""
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
        return Turn(used / messages / size * 1e6, used / messages * 1e6, messages / took, size)


def tokens_for(server: own_server.Server, shape: Shape, seconds: float) -> int:
    """A stream's length that takes about so long."""
    if shape.pace:
        return int(seconds / shape.pace) * shape.step
    trial = turn(server, shape, 1000 * shape.message)
    return max(1000 * shape.message, int(seconds * trial.rate * trial.size / shape.streams))


def pairs(before: Path, shape: Shape, count: int, seconds: float) -> list[tuple[Turn, Turn]]:
    """The other tree's turn and this one's, of a fresh server each."""
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
    """The median, and the standard deviation of medians of as many drawn from them."""
    drawn = [statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(_DRAWS)]
    return statistics.median(ratios), statistics.pstdev(drawn)


def summary(found: Sequence[tuple[Turn, Turn]]) -> dict[str, float]:
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


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    found: dict[str, list[tuple[Turn, Turn]]] = {shape.name: [] for shape in shapes}
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
    main()
