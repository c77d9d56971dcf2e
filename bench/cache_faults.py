"""What a faulty Redis adds to requests that no cache has, one after the other through one server: Redis gone, stalled,
slow, cutting its answers, full, read-only, emptied before every request. Prints a table and ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.about import device, revision
from bench.cache import Figures, measuring, quantiles, request
from bench.front import server
from bench.grpc_frames import FrameClient
from bench.redis_server import Proxy, RedisServer, proxy_in_thread, redis_server, write_keys

SLOW = 0.1  # seconds an answer takes
CUT = 9  # bytes of an answer that arrive
RECOVERY = 2.0  # seconds


def faults(redis: RedisServer, between: Proxy) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """How to cause each fault, and how to end it. The last one cannot be ended."""

    def slow(seconds: float) -> None:
        between.delay = seconds

    def cut(after: int | None) -> None:
        between.cut_after = after

    def full(limit: str) -> None:
        redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        redis.command("CONFIG", "SET", "maxmemory", limit)

    def follow(host: str, port: str) -> None:
        redis.command("REPLICAOF", host, port)

    def nothing() -> None:
        pass

    return {
        "well": (nothing, nothing),
        "slow": (lambda: slow(SLOW), lambda: slow(0.0)),
        "cut": (lambda: cut(CUT), lambda: cut(None)),
        "full": (lambda: full("1"), lambda: full("0")),
        "read-only": (lambda: follow("127.0.0.1", "1"), lambda: follow("NO", "ONE")),
        "emptied": (nothing, nothing),  # before every request
        "stalled": (redis.pause, redis.resume),
        "well again": (nothing, nothing),
        "gone": (redis.stop, nothing),
    }


def measure(count: int) -> Figures:
    """Milliseconds of a whole request of one token; one that fails ends the run."""
    result: Figures = {}
    with tempfile.TemporaryDirectory() as folder, redis_server() as redis, proxy_in_thread(redis.port) as between:
        url, keys = f"--cache.redis-url={between.url}", write_keys(Path(folder) / "keys")
        flags = (url, f"--cache.key-file={keys}", "--cache.semantic.mode=off", "--optimizations.response-cache=true")
        with server(*flags) as (address, _):
            client = FrameClient(address, time.monotonic)
            sent = 0
            for name, (cause, end) in faults(redis, between).items():
                cause()
                times = []
                with measuring(f"requests, Redis {name}"):
                    for _ in range(count):
                        if name == "emptied":
                            redis.command("FLUSHALL")
                        times.append(request(client, sent, f"{name} {sent}", 1))
                        sent += 1
                result[name] = quantiles(times)
                end()
                time.sleep(RECOVERY)
            client.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400, help="requests of each kind")
    given = parser.parse_args()
    figures = measure(given.count)
    for name, found in figures.items():
        added = found["p99"] - figures["well"]["p99"]
        print(
            f"{name:10}  p50 {found['p50']:7.2f}  p99 {found['p99']:7.2f} ms, {added:+.2f} against a Redis that is well"
        )
    print(json.dumps({"bench": "cache faults", "sha": revision(), "device": device(), "figures": figures}))


if __name__ == "__main__":
    main()
