"""Measures what shared prefixes save: time to first token, hits on a trace by capacity, and the gate's decisions.
Tables, and one JSON line.

    python -m bench.prefix --model models/demo --trace mooncake_conversation.jsonl.gz

Time to first token is of the engine's own loop without its socket, greedy, median of the rounds. A shared prefix of
512 tokens comes with another question behind it each time: computed whole, found on the device, and fetched from Redis
by an engine that was just started. Needs `redis-server` in the path.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis

from bench.redis_server import redis_server, write_keys
from bench.replay import LruBlocks, replay_prefix
from bench.result import device, revision, run_one_of
from bench.workloads import read_blocks
from cache.api import BlockLayout, BlockRun, BlockSettings, CacheKey, RedisSettings
from cache.kv_blocks.codec import OVERHEAD, RunCodec
from cache.kv_blocks.connection import connect
from cache.kv_blocks.gate import FetchGate
from cache.kv_blocks.store import RedisBlocks
from cache.open.counters import Counters
from cache.seal.keyring import Keyring
from engine.execution.runner import ModelRunner
from engine.fake import plain_request
from engine.kv.open_tier import open_tier
from engine.kv.page_pool import PagePool
from engine.kv.prefix_index import PrefixIndex, kv_identity
from engine.kv.shared_tier import BlockTier
from engine.scheduling.limits import Limits
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.settings import PAGE_SIZE, EngineSettings
from engine.worker.build import build

SHARED = 512  # tokens
QUESTION = 16
CAPACITIES = (1000, 5000, 20_000)  # blocks of 512 tokens
LLAMA_8B = 131_072  # bytes of keys and values a token, of Llama 3.1 8B in bfloat16


class DevicePages:
    """Adapts the engine's own index to a `bench.replay` prefix index: each block of the trace is a page."""

    def __init__(self, capacity: int) -> None:
        self._pool = PagePool(capacity)
        self._index = PrefixIndex(self._pool)

    def match(self, blocks: Items[int]) -> int:
        return len(self._index.find(self._sequence(blocks)))

    def insert(self, blocks: Items[int]) -> None:
        sequence = self._sequence(blocks[: self._pool.total])
        self._index.begin(sequence, self._index.find(sequence))
        whole = len(sequence.token_ids) // PAGE_SIZE
        sequence.pages += self._index.allocate(whole - len(sequence.pages)) or []
        sequence.advance(len(sequence.pages) * PAGE_SIZE)
        self._index.note(sequence)
        self._index.release(sequence)

    @staticmethod
    def _sequence(blocks: Items[int]) -> Sequence:
        """Makes one page a block, and one token after them."""
        ids = [block for block in blocks for _ in range(PAGE_SIZE)]
        return Sequence(plain_request((*ids, 0)), [*ids, 0])


class PrefixEngine:
    """Runs the engine's loop without its socket, in the state of a process that has just started."""

    def __init__(self, runner: ModelRunner, tier: BlockSettings | None, prefixes: bool = True) -> None:
        self.runner = runner
        info, pages = runner.info, runner.pages
        pool = PagePool(info.total_pages)
        index = PrefixIndex(pool, kv_identity(info, pages.layout), prefixes)
        self.store = None if tier is None else open_tier(tier, pages.layout)[0]
        self.tier = None if self.store is None else BlockTier(self.store, pages, index)
        limits = Limits(
            max_sequences=info.max_sequences,
            max_batch_tokens=512,
            max_context=info.max_context,
            lookahead_tokens=info.lookahead_tokens,
            max_tokens_per_row=info.max_tokens_per_row,
        )
        self.scheduler = Scheduler(limits, pool, prefixes=index, tier=self.tier)
        self._keys = 0

    def ask(self, token_ids: tuple[int, ...], tokens: int = 2) -> tuple[float, int, tuple[int, ...]]:
        """Returns seconds to the first token, cached tokens, answer."""
        self._keys += 1
        begun = time.perf_counter()
        request = plain_request(token_ids, tokens)
        self.scheduler.admit(Sequence(request, list(token_ids), key=self._keys))
        first, cached = 0.0, 0
        answer: tuple[int, ...] = ()
        while self.scheduler.live:
            self.scheduler.collect()
            plan = self.scheduler.plan(time.monotonic())
            if plan is None:
                time.sleep(0.0005)
                continue
            for event in self.scheduler.commit(plan, self.runner.run(plan), time.monotonic()):
                answer += event.token_ids
                if event.start is not None:
                    first, cached = time.perf_counter() - begun, event.start.cached_tokens
        return first, cached, answer

    def settle(self) -> None:
        """Waits until all that is worth keeping has been written."""
        while self.tier is not None and self.tier.spare():
            pass
        if isinstance(self.store, RedisBlocks) and not self.store.drained(30):
            raise SystemExit("Redis did not take what was written")

    def close(self) -> None:
        """Ends the store's threads."""
        if self.tier is not None:
            self.tier.close()


def first_tokens(model: str, rounds: int, threads: int | None, redis: BlockSettings) -> dict[str, Any]:
    """Measures the three ways to a first token, one after the other in each round."""
    settings = EngineSettings(model=model, device="cpu", threads=threads)
    rng = random.Random(1)
    vocabulary = build(settings, _quiet).info.vocab_size
    taken: dict[str, list[float]] = {"computed": [], "device": [], "redis, after a restart": []}
    cached: dict[str, int] = {}
    gate: dict[str, Any] = {}
    for _ in range(rounds):
        shared = tuple(rng.randrange(3, vocabulary) for _ in range(SHARED))
        runner = build(settings, _quiet)
        first = PrefixEngine(runner, redis)
        whole = PrefixEngine(runner, None, prefixes=False)
        _warm(whole, rng, vocabulary)
        _warm(first, rng, vocabulary)
        asked = [(*shared, *(rng.randrange(3, vocabulary) for _ in range(QUESTION))) for _ in range(3)]
        seconds, cached["computed"], plain = whole.ask(asked[2])
        taken["computed"].append(seconds)
        first.ask(asked[0])
        seconds, cached["device"], found = first.ask(asked[2])
        taken["device"].append(seconds)
        first.settle()
        first.close()
        second = PrefixEngine(build(settings, _quiet), redis)
        _warm(second, rng, vocabulary)
        seconds, cached["redis, after a restart"], fetched = second.ask(asked[2])
        taken["redis, after a restart"].append(seconds)
        if not plain == found == fetched:
            raise SystemExit("the answers differ")
        if isinstance(second.store, RedisBlocks) and isinstance(first.store, RedisBlocks):
            gate = {
                "link_bytes_per_second": second.store.gate.rates.bytes_per_second,
                "round_trip_seconds": second.store.gate.rates.round_trip,
                "prefill_tokens_per_second": first.store.gate.rates.tokens_per_second,
                "token_bytes": runner.pages.layout.token_bytes,
            }
        second.close()
    middle = {name: statistics.median(values) for name, values in taken.items()}
    ratio = [
        statistics.median(one / two for one, two in zip(taken["computed"], taken[name], strict=True)) for name in taken
    ]
    return {
        "milliseconds": {name: 1e3 * value for name, value in middle.items()},
        "times_faster": dict(zip(taken, ratio, strict=True)),
        "cached_tokens": cached,
        "gate": gate,
    }


def _warm(engine: PrefixEngine, rng: random.Random, vocabulary: int) -> None:
    """Warms up with other prompts of the same lengths, so that no variant pays for first calls."""
    shared = tuple(rng.randrange(3, vocabulary) for _ in range(SHARED))
    for _ in range(3):
        engine.ask((*shared, *(rng.randrange(3, vocabulary) for _ in range(QUESTION))))
    engine.settle()


def decisions(gate: dict[str, Any], rates: Items[int]) -> list[dict[str, Any]]:
    """Returns the gate's decision for 512 tokens at the measured link, by prefill rate."""
    found = []
    for token_bytes in (gate["token_bytes"], LLAMA_8B):
        for rate in (gate["prefill_tokens_per_second"], *rates):
            gate_of_rate = FetchGate(token_bytes, 128)
            gate_of_rate.answered(gate["round_trip_seconds"] or 0.0)
            gate_of_rate.fetched(int(gate["link_bytes_per_second"]), 1.0 + (gate["round_trip_seconds"] or 0.0))
            gate_of_rate.computed(int(rate), 1.0)
            decision = gate_of_rate.decide(SHARED)
            found.append(
                {"token_bytes": token_bytes, "prefill_tokens_per_second": round(rate), "fetch": decision.fetch}
            )
    return found


def trace(path: Path) -> list[dict[str, Any]]:
    """Hits by capacity, of the engine's index and of an independent simulation."""
    requests = read_blocks(path)
    found = []
    for capacity in CAPACITIES:
        device, simulated = (replay_prefix(requests, index) for index in (DevicePages(capacity), LruBlocks(capacity)))
        row = {"blocks": capacity, "device": device.rate, "simulated": simulated.rate}
        found.append({**row, "device_beyond_head": device.rate_beyond_head})
    return found


@contextmanager
def shared() -> Iterator[BlockSettings]:
    with tempfile.TemporaryDirectory() as folder, redis_server() as redis:
        yield BlockSettings(redis=RedisSettings(url=redis.url), key_file=write_keys(Path(folder) / "keys"))


def report(line: dict[str, Any]) -> None:
    first = line["first_token"]
    print(f"{'first token, ms':28} {'median':>8} {'faster':>8} {'cached':>7}")
    for name, value in first["milliseconds"].items():
        print(f"{name:28} {value:8.1f} {first['times_faster'][name]:7.1f}x {first['cached_tokens'][name]:7}")
    for row in line["gate"]:
        verdict = "fetch" if row["fetch"] else "compute"
        print(f"{row['token_bytes']:7} B/token, prefill {row['prefill_tokens_per_second']:7}/s: {verdict}")
    for row in line["trace"]:
        print(f"{row['blocks']:6} blocks: {100 * row['device']:.2f} % hits, simulated {100 * row['simulated']:.2f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="models/demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="the engine's; its own choice by default")
    parser.add_argument("--trace", type=Path, help="of blocks, in Mooncake's format")
    parser.add_argument("--rates", type=int, nargs="*", default=[25_000], help="prefill rates for the gate")
    arguments = parser.parse_args()
    with shared() as redis:
        first = first_tokens(arguments.model, arguments.rounds, arguments.threads, redis)
    line = {
        "bench": "prefix",
        "sha": revision(),
        "device": device(),
        "settings": {"model": Path(arguments.model).name, "shared": SHARED, "question": QUESTION},
        "rounds": arguments.rounds,
        "first_token": first,
        "gate": decisions(first["gate"], arguments.rates),
        "trace": [] if arguments.trace is None else trace(arguments.trace),
    }
    report(line)
    print(json.dumps(line))


def _quiet(stage: str, done: int, total: int) -> None:
    pass


COUNT = 64
LAYOUT = BlockLayout(layers=16, kv_heads=8, head_dim=64, dtype="bfloat16", item_bytes=2, page_size=16)
TOKENS = (1 << 20) // LAYOUT.token_bytes
MIB = 1 << 20
PATIENCE = 60.0  # seconds; far from what any round takes

Taken = Callable[[int, memoryview], None]  # a sealed value that arrived, by its place


class Ours:
    """Reads as `RedisBlocks` does: the next value is requested before this one is read, into one buffer."""

    def __init__(self, url: str) -> None:
        self._link = connect(RedisSettings(url=url), time.monotonic() + PATIENCE)
        self._scratch = memoryview(bytearray(MIB + OVERHEAD))

    def store(self, key: CacheKey, value: bytes) -> None:
        deadline = time.monotonic() + PATIENCE
        self._link.command(b"SET", key.name.encode(), memoryview(value), b"PX", b"600000", deadline=deadline)

    def fetch(self, keys: Items[CacheKey], take: Taken) -> None:
        deadline = time.monotonic() + PATIENCE
        for place in range(len(keys)):
            for ahead in keys[place + bool(place) : place + 2]:
                self._link.send(b"GET", ahead.name.encode(), deadline=deadline)
            length = self._link.bulk(self._scratch, deadline)
            take(place, self._scratch[:length])


class Library:
    """Uses redis-py with hiredis: one value a command, or all in one MGET or pipeline."""

    def __init__(self, url: str, way: str, read_size: int) -> None:
        self._client = Redis.from_url(url, protocol=2, socket_timeout=PATIENCE, socket_read_size=read_size)
        self._way = way

    def store(self, key: CacheKey, value: bytes) -> None:
        self._client.set(key.name, value, px=600_000)

    def fetch(self, keys: Items[CacheKey], take: Taken) -> None:
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


def blocks_main() -> None:
    """Keys and values to and from Redis: our RESP client beside redis-py with hiredis, 64 values of 1 MiB each.

    Every variant runs in a process of its own, so that its memory is its own. Each stores 64 values and then fetches
    them in rounds; what is fetched ends decrypted in the caller's buffers, which is where the engine wants it.
    `transport` stops before decrypting. `python -m bench.prefix blocks [--rounds 15]`.
    """
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
            command = [sys.executable, "-m", "bench.prefix", "blocks", "--rounds", str(given.rounds)]
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
    sys.exit(run_one_of(main, blocks=blocks_main))
