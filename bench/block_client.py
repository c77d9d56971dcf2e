"""Keys and values to and from Redis: our RESP client beside redis-py with hiredis, 64 values of 1 MiB each.

Every variant runs in a process of its own, so that its memory is its own. Each stores 64 values and then fetches them
in rounds; what is fetched ends decrypted in the caller's buffers, which is where the engine wants it. `transport` stops
before decrypting. `python -m bench.block_client [--rounds 15]`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis import Redis

from bench.about import device, revision
from bench.redis_server import redis_server
from cache.api import BlockLayout, BlockRun, CacheKey, RedisSettings
from cache.kv_blocks.codec import OVERHEAD, RunCodec
from cache.kv_blocks.connection import connect
from cache.open.counters import Counters
from cache.seal.keyring import Keyring

COUNT = 64
LAYOUT = BlockLayout(layers=16, kv_heads=8, head_dim=64, dtype="bfloat16", item_bytes=2, page_size=16)
TOKENS = (1 << 20) // LAYOUT.token_bytes
MIB = 1 << 20
PATIENCE = 60.0  # seconds; far from what any round takes

Taken = Callable[[int, memoryview], None]  # a sealed value that arrived, by its place


class Ours:
    """As `RedisBlocks` does it: the next value is asked for before this one is read, into one buffer."""

    def __init__(self, url: str) -> None:
        self._link = connect(RedisSettings(url=url), time.monotonic() + PATIENCE)
        self._scratch = memoryview(bytearray(MIB + OVERHEAD))

    def store(self, key: CacheKey, value: bytes) -> None:
        deadline = time.monotonic() + PATIENCE
        self._link.command(b"SET", key.name.encode(), memoryview(value), b"PX", b"600000", deadline=deadline)

    def fetch(self, keys: Sequence[CacheKey], take: Taken) -> None:
        deadline = time.monotonic() + PATIENCE
        for place in range(len(keys)):
            for ahead in keys[place + bool(place) : place + 2]:
                self._link.send(b"GET", ahead.name.encode(), deadline=deadline)
            length = self._link.bulk(self._scratch, deadline)
            take(place, self._scratch[:length])


class Library:
    """redis-py with hiredis: one value a command, or all in one MGET or pipeline."""

    def __init__(self, url: str, way: str, read_size: int) -> None:
        self._client = Redis.from_url(url, protocol=2, socket_timeout=PATIENCE, socket_read_size=read_size)
        self._way = way

    def store(self, key: CacheKey, value: bytes) -> None:
        self._client.set(key.name, value, px=600_000)

    def fetch(self, keys: Sequence[CacheKey], take: Taken) -> None:
        names = [key.name for key in keys]
        values: Any
        if self._way == "get":
            for place, name in enumerate(names):
                found: Any = self._client.get(name)
                take(place, memoryview(found))
            return
        if self._way == "mget":
            values = self._client.mget(names)
        else:
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.get(name)
            values = pipe.execute()
        for place, value in enumerate(values):
            take(place, memoryview(value))


VARIANTS: dict[str, Callable[[str], Ours | Library]] = {
    "ours": Ours,
    "redis-py get": lambda url: Library(url, "get", 65_536),
    "redis-py get, reads of 1 MiB": lambda url: Library(url, "get", MIB),
    "redis-py pipeline, reads of 1 MiB": lambda url: Library(url, "pipeline", MIB),
    "redis-py mget, reads of 1 MiB": lambda url: Library(url, "mget", MIB),
}


def measured(name: str, url: str, rounds: int) -> dict[str, float]:
    """Medians in milliseconds of all 64, and how much the process grew, in MiB, beyond the buffers."""
    codec = RunCodec(Keyring.generate(), LAYOUT, Counters())
    runs = [BlockRun(bytes([n]) * 32, bytes(32), TOKENS) for n in range(COUNT)]
    keys = [codec.key("ab" * 16, run) for run in runs]
    into = [memoryview(bytearray(b"\1") * MIB) for _ in runs]
    sealed = [codec.seal(key, run, bytes([n]) * MIB) for n, (key, run) in enumerate(zip(keys, runs, strict=True))]
    client = VARIANTS[name](url)
    client.store(keys[0], sealed[0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times: dict[str, list[float]] = {"store": [], "transport": [], "fetch": []}
    lengths: list[int] = []

    def opened(place: int, value: memoryview) -> None:
        assert codec.open(keys[place], runs[place], value, into[place])

    def stored() -> None:
        for key, value in zip(keys, sealed, strict=True):
            client.store(key, value)

    steps: dict[str, Callable[[], None]] = {
        "store": stored,
        "transport": lambda: client.fetch(keys, lambda place, value: lengths.append(len(value))),
        "fetch": lambda: client.fetch(keys, opened),
    }
    for _ in range(rounds):
        for step, work in steps.items():
            begun = time.perf_counter()
            work()
            times[step].append(1e3 * (time.perf_counter() - begun))
    assert set(lengths) == {MIB + OVERHEAD}
    assert all(bytes(view[:4]) == bytes([n]) * 4 for n, view in enumerate(into))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {f"{step}_ms": statistics.median(each) for step, each in times.items()} | {"grown_mib": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description="Our RESP client beside redis-py, 64 values of 1 MiB.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--one", nargs=2, metavar=("VARIANT", "URL"), help="measures one, for the others' sake")
    given = parser.parse_args()
    if given.one:
        name, url = given.one
        print(json.dumps(measured(name, url, given.rounds)))
        return
    found: dict[str, dict[str, float]] = {}
    with redis_server() as server:
        for name in VARIANTS:
            command = [sys.executable, "-m", "bench.block_client", "--rounds", str(given.rounds)]
            done = subprocess.run([*command, "--one", name, server.url], capture_output=True, text=True, check=True)
            found[name] = json.loads(done.stdout)
    print(f"{'':36}{'store':>10}{'transport':>11}{'fetch':>10}{'grown':>11}")
    for name, row in found.items():
        columns = f"{row['store_ms']:7.1f} ms{row['transport_ms']:8.1f} ms{row['fetch_ms']:7.1f} ms"
        print(f"{name:36}{columns}{row['grown_mib']:7.1f} MiB")
    print(
        json.dumps(
            {
                "bench": "block_client",
                "sha": revision(),
                "device": device(),
                "values": COUNT,
                "bytes": MIB,
                "variants": found,
            }
        )
    )


if __name__ == "__main__":
    main()
