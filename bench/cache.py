"""Measures what the caches cost and save, on plain Redis: a semantic lookup by length of the question, idle and while
an answer is generated; a stored answer beside a generated one. Prints tables and ends in one JSON line. Starts a
redis-server of its own, and servers on free ports."""

from __future__ import annotations

import argparse
import ast
import asyncio
import gc
import inspect
import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import uvloop
from scipy.stats import binomtest  # type: ignore[import-untyped]

from bench.front import UNARY, server
from bench.grpc_frames import FrameClient
from bench.redis_server import Proxy, RedisServer, proxy_in_thread, redis_server, write_keys
from bench.result import ROOT, device, revision, run_one_of
from cache.answers.exact import ExactCache
from cache.api import (
    Allowance,
    AnswerEnding,
    AnswerPart,
    CachedCompletion,
    Mode,
    ModelIdentity,
    Question,
    RedisSettings,
    ResponseSettings,
    SemanticSettings,
    SemanticTurn,
)
from cache.open.counters import Counters
from cache.seal.context import CacheContext
from cache.seal.envelope import Envelope
from cache.seal.keyring import Keyring
from cache.seal.partition import Epochs, Partitions
from cache.semantic.embedder import ModelEmbedder, Vector, open_embedder
from cache.semantic.export import exported
from cache.semantic.guard import strictly_equal, veto
from cache.semantic.search import SimilarCache
from cache.store.redis_store import RedisStore
from service.pb.whippet.v1 import generation_pb2 as pb

LENGTHS = (8, 16, 24, 32, 48, 64, 128, 200)  # the embedder's tokens, upper borders
REAL = 2000  # entries that are sentences; the others are random directions
_FILLER = "filler "
QUERIES = ROOT / "tests" / "bench" / "data" / "clinc_500.json"  # queries to assistants, of CLINC150
QUERIED = "as long as they come"
Figures = dict[str, dict[str, float]]
Buckets = dict[str, list[str]]  # texts by what their figures are called


class Mixed:
    """Uses the real embedder, but random vectors for texts that only fill the index."""

    def __init__(self, real: ModelEmbedder) -> None:
        self._real = real
        self._random = np.random.default_rng(1)
        self.digest, self.width = real.digest, real.width

    def tokens(self, text: str) -> int:
        return self._real.tokens(text)

    def embed(self, text: str) -> Vector:
        if not text.startswith(_FILLER):
            return self._real.embed(text)
        found: Vector = self._random.standard_normal(self.width).astype(np.float32)
        return found / np.float32(np.linalg.norm(found))


def sentences() -> list[str]:
    """Returns sentences of docstrings of Python's standard library: English of every length, on every machine."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
                for paragraph in text.split("\n\n"):
                    words = " ".join(paragraph.split())
                    found[words] = None
                    found.update(dict.fromkeys(re.split(r"(?<=[.?!]) ", words)))
    return [text for text in found if len(text.split()) >= 3 and not re.search(r"\d[\d -]{7,}\d|@", text)]


def turn(text: str) -> SemanticTurn:
    ids = tuple(text.encode())
    question = Question(tenant="bench", token_ids=ids, parameters=(), max_tokens=512, deterministic=True)
    return SemanticTurn(question=question, context=b"", text=text, greedy=True)


def answer() -> CachedCompletion:
    """Returns 200 tokens, about 1 KB."""
    parts = [AnswerPart((n,), "word ") for n in range(199)]
    ending = AnswerEnding(reason="stop", prompt_tokens=1, completion_tokens=200)
    return CachedCompletion(
        parts=(*parts, AnswerPart((199,), "", ending)), max_tokens=512, provenance="bench", created_at=time.time()
    )


class Lookups:
    def __init__(self, url: str) -> None:
        counter, keyring = Counters(), Keyring.generate()
        partitions = Partitions(keyring, ModelIdentity(weights="bench", tokenizer="bench"))
        store = RedisStore(RedisSettings(url=url, budget=1.0), counter)
        context = CacheContext(
            store, partitions, Epochs(store, partitions), Envelope(keyring, 1 << 20, counter), counter
        )
        self.embedder = Mixed(open_embedder(exported()))
        self.exact = ExactCache(context, ResponseSettings())
        self.similar = SimilarCache(context, self.embedder, SemanticSettings(mode=Mode.ON, audit=0.0))

    async def fill(self, texts: list[str], entries: int) -> None:
        filler = (f"{_FILLER}number {n} of many" for n in range(entries - len(texts)))
        for number, text in enumerate((*texts, *filler)):
            await self.similar.put(turn(text), answer())
            if number % 200 == 0:
                await asyncio.sleep(0.05)  # so that the write queue empties
        await asyncio.sleep(3.0)  # writes in the background, and the index that follows them

    async def measure(self, buckets: Buckets) -> dict[str, list[float]]:
        """Measures milliseconds of both lookups, for a request that the response cache does not have."""
        found: dict[str, list[float]] = {}
        order = [(name, text) for name, texts in buckets.items() for text in texts]
        random.Random(2).shuffle(order)
        for _, text in order[:20]:
            await self.similar.lookup(turn(text), Allowance(1.0))
        await asyncio.sleep(1.0)  # the first of them made the index follow the directory
        gc.freeze()  # as a server does once it is ready
        for name, text in order:
            allowance, begun = Allowance(1.0), time.perf_counter()
            given = turn(text)
            self.similar.begin(given)  # as the service does where the store is another process
            if await self.exact.get(given.question, allowance) is None:
                await self.similar.lookup(given, allowance)
            found.setdefault(name, []).append((time.perf_counter() - begun) * 1e3)
        return found


def bucketed(lookups: Lookups, texts: list[str], each: int) -> Buckets:
    """Returns `each` texts of every length, half of them stored questions in other spelling; and real queries to
    assistants."""
    buckets: Buckets = {f"≤ {border} tokens": [] for border in LENGTHS}
    for text in texts:
        length = lookups.embedder.tokens(text)
        border = next((border for border in LENGTHS if length <= border), None)
        some = buckets.get(f"≤ {border} tokens", [])
        if length >= 3 and len(some) < each:
            some.append(text.lower().rstrip(".") if len(some) % 2 else text)
    queries = [str(query[0]) for query in json.loads(QUERIES.read_text())["test"]]
    return buckets | {QUERIED: [text for text in queries if lookups.embedder.tokens(text) >= 3][: 4 * each]}


@contextmanager
def generating() -> Iterator[None]:
    """Keeps the demo model answering one request after the other, on one thread."""
    code = (
        "import sys, time, grpc\n"
        "from service.pb.whippet.v1 import generation_pb2 as pb, generation_pb2_grpc as rpc\n"
        "stub = rpc.GenerationServiceStub(grpc.insecure_channel(sys.argv[1]))\n"
        "request = pb.GenerateStreamRequest(text='def main():', output=pb.OutputOptions(logprobs=0))\n"
        "request.stopping.max_tokens, request.stopping.ignore_eos = 400, True\n"
        "while True:\n"
        "    for _ in stub.GenerateStream(request): pass\n"
    )
    flags = ("--engine=model", f"--model={ROOT / 'models' / 'demo'}", "--device=cpu", "--scheduler.threads=1")
    with (
        server(*flags) as (address, _),
        subprocess.Popen([sys.executable, "-c", code, address], cwd=ROOT) as client,
    ):
        try:
            time.sleep(3.0)
            yield
        finally:
            client.kill()


@contextmanager
def measuring(what: str) -> Iterator[None]:
    """Prints begin and end on stderr, so that the machine can be kept quiet in between."""
    print(f"measuring: {what}", file=sys.stderr, flush=True)
    yield
    print(f"measured: {what}", file=sys.stderr, flush=True)


def quantiles(values: list[float]) -> dict[str, float]:
    """Returns median and tails, in milliseconds, to the microsecond."""
    ordered = sorted(values)
    at = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in QUANTILES.items()}
    return {name: round(value, 3) for name, value in at.items()} | {"count": len(ordered)}


QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def lookups(entries: int, each: int, rounds: int) -> Figures:
    """Measures the semantic path by length, idle and beside a generation."""

    async def run(url: str) -> Figures:
        texts = sentences()
        random.Random(1).shuffle(texts)
        filled = Lookups(url)
        buckets = bucketed(filled, texts, each)
        stored = list(dict.fromkeys(text for some in buckets.values() for text in some[::3]))
        await filled.fill([*stored, *texts[-max(0, REAL - len(stored)) :]][:REAL], entries)
        result: Figures = {}
        for name, beside in (("idle", nullcontext), ("generating", generating)):
            times: dict[str, list[float]] = {}
            with beside(), measuring(f"lookups, {name}"):
                for _ in range(rounds):
                    for bucket, found in (await filled.measure(buckets)).items():
                        times.setdefault(bucket, []).extend(found)
            for bucket in buckets:
                result[f"lookup, {name}, {bucket}"] = quantiles(times.get(bucket, [0.0]))
            upto48 = [t for border in LENGTHS[:5] for t in times.get(f"≤ {border} tokens", [])]
            result[f"lookup, {name}, up to 48 tokens"] = quantiles(upto48)
        await filled.similar.aclose()
        return result

    with redis_server() as redis:
        return uvloop.run(run(redis.url))


def request(client: FrameClient, number: int, text: str, tokens: int) -> float:
    message = pb.GenerateRequest(text=text, sampling=pb.SamplingOptions(temperature=0))
    message.stopping.max_tokens = tokens
    begun = time.perf_counter()
    stream = client.streams[client.start(UNARY, message.SerializeToString())]
    while client.ended <= number and client.read():
        pass
    if stream.status != 0:
        raise RuntimeError(f"a request ended with {stream.status}")
    return (time.perf_counter() - begun) * 1e3


def replays(count: int) -> Figures:
    """Compares a stored answer of 64 tokens with the same one without caches, whose engine takes 1 ms a token."""
    result: Figures = {}
    for name, enabled in (("stored", "true"), ("generated", "false")):
        flags = (f"--optimizations.response-cache={enabled}", "--cache.semantic.mode=off", "--fake.step-time=0.001")
        with server(*flags) as (address, _):
            client = FrameClient(address, time.monotonic)
            request(client, 0, "again and again", 64)
            time.sleep(1.2)
            with measuring(f"answers, {name}"):
                times = [request(client, n, "again and again", 64) for n in range(1, count + 1)]
            client.close()
            result[f"answer of 64 tokens, {name}"] = quantiles(times)
    return result


def main() -> None:
    """Runs all parts, or those of `--part`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("lookups", "replays"), action="append")
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--each", type=int, default=60, help="questions of each length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=400, help="requests of each kind")
    given = parser.parse_args()
    parts: dict[str, Callable[[], Figures]] = {
        "lookups": lambda: lookups(given.entries, given.each, given.rounds),
        "replays": lambda: replays(given.count),
    }
    figures: Figures = {}
    for name in given.part or parts:
        figures |= parts[name]()
    width = max(map(len, figures))
    for name, found in figures.items():
        cells = "  ".join(f"{key} {value:8.3f}" for key, value in found.items() if key != "count")
        print(f"{name:{width}}  {cells}  ms  of {found['count']:.0f}")
    about = {"sha": revision(), "device": device(), "entries": given.entries, "load": os.getloadavg()[0]}
    print(json.dumps({"bench": "cache", **about, "figures": figures}, ensure_ascii=False))


SLOW = 0.1  # seconds an answer takes
CUT = 9  # bytes of an answer that arrive
RECOVERY = 2.0  # seconds


def faults(redis: RedisServer, between: Proxy) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """Returns how to cause each fault, and how to end it. The last one cannot be ended."""

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
    """Measures milliseconds of a whole request of one token; a failed one ends the run."""
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


def faults_main() -> None:
    """Measures what a faulty Redis adds to requests that no cache has, one after the other through one server: Redis
    gone, stalled, slow, cutting its answers, full, read-only, emptied before every request. Prints a table and ends in
    one JSON line."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(faults_main))
    parser.add_argument("--count", type=int, default=400, help="requests of each kind")
    given = parser.parse_args()
    figures = measure(given.count)
    for name, found in figures.items():
        added = found["p99"] - figures["well"]["p99"]
        print(
            f"{name:10}  p50 {found['p50']:7.2f}  p99 {found['p99']:7.2f} ms, {added:+.2f} against a Redis that is well"
        )
    print(json.dumps({"bench": "cache faults", "sha": revision(), "device": device(), "figures": figures}))


DATA = ROOT / "tests" / "cache" / "semantic" / "data"
SUITES = ("pairs", "signs", "ordinary")  # their halves that no rule was written beside
COSINE = 0.90
STRICT_COSINE = 0.80


def served(suite: str, embedder: ModelEmbedder) -> dict[str, dict[str, object]]:
    """Counts for each rule the served pairs of equal and of different meaning, with a 95 % interval."""
    rows = [json.loads(line) for line in (DATA / f"{suite}_held_out.jsonl").read_text().splitlines()]
    same = {"signs": False, "ordinary": True}
    totals: Counter[bool] = Counter()
    counts: Counter[tuple[str, bool]] = Counter()
    for row in rows:
        means = row["same"] if suite == "pairs" else same[suite]
        totals[means] += 1
        near = float(embedder.embed(row["a"]) @ embedder.embed(row["b"]))
        equal = strictly_equal(row["a"], row["b"]) and not veto(row["a"], row["b"])
        counts["guarded", means] += equal and near >= STRICT_COSINE
        counts["cosine", means] += near >= COSINE
    return {rule: _shares(totals, counts[rule, False], counts[rule, True]) for rule in ("guarded", "cosine")}


def _shares(totals: Counter[bool], wrong: int, right: int) -> dict[str, object]:
    found: dict[str, object] = {"wrong": wrong, "wrong_of": totals[False], "right": right, "right_of": totals[True]}
    if totals[False]:
        low, high = binomtest(wrong, totals[False]).proportion_ci(method="wilson")
        found["wrong_share"] = [round(float(low), 4), round(float(high), 4)]
    return found


def pairs_main() -> None:
    """Compares the semantic cache's guard with a cosine threshold alone, on pairs that no rule was written beside. Ends
    in one JSON line. No clock is involved; only the embedder's digest matters."""
    embedder = open_embedder(exported())
    figures = {suite: served(suite, embedder) for suite in SUITES}
    for suite, rules in figures.items():
        for rule, row in rules.items():
            wrong, right = f"{row['wrong']} of {row['wrong_of']}", f"{row['right']} of {row['right_of']}"
            print(f"{suite:10} {rule:10} wrong {wrong}, right {right}")
    settings = {"cosine": COSINE}
    print(
        json.dumps({"bench": "pairs", "sha": revision(), "device": device(), "settings": settings, "figures": figures})
    )


if __name__ == "__main__":
    sys.exit(run_one_of(main, faults=faults_main, pairs=pairs_main))
