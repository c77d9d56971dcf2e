"""Implements `whippet cache replay`: runs traces through the caches and prints what they would have saved, and how
often wrongly.

Nothing leaves this process: the stores are in memory, and questions are answered with their own labels.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.workloads import Labelled, TraceRequest, read_blocks, read_labelled
from cache.answers.exact import ExactCache
from cache.api import (
    Allowance,
    AnswerEnding,
    AnswerPart,
    CachedCompletion,
    Mode,
    ModelIdentity,
    Question,
    ResponseCache,
    ResponseSettings,
    SemanticCache,
    SemanticSettings,
    SemanticTurn,
)
from cache.open.counters import Counters
from cache.seal.context import CacheContext
from cache.seal.envelope import Envelope
from cache.seal.keyring import Keyring
from cache.seal.partition import Epochs, Partitions
from cache.semantic.embedder import Embedder, open_embedder
from cache.semantic.export import ExportFailed, exported, missing
from cache.semantic.search import SimilarCache
from cache.store.memory import MemoryStore

_STOPPED = 130  # as a shell says that ctrl-C ended a command
_MEMORY = 4 * 2**30  # bytes; room for a whole trace


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a report a trace. 2 where a file is not what it should be, 1 where the embedder is missing."""
    flags = _parser().parse_args(argv)
    if not flags.blocks and not flags.questions:
        sys.stderr.write("whippet cache replay: name a trace: --blocks FILE, --questions FILE\n")
        return 2
    try:
        for path in flags.blocks:
            _say(_blocks(path, flags.capacity, flags.limit))
        for path in flags.questions:
            _say(asyncio.run(_questions(path, flags)))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"whippet cache replay: {' '.join(str(error).split())}\n")
        return 2
    except ExportFailed as error:
        sys.stderr.write(f"whippet cache replay: {error}\n")
        return 1
    except KeyboardInterrupt:
        return _STOPPED
    return 0


def _say(lines: list[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="whippet cache",
        description="Runs traces through the caches: hit rates by kind, false hits with their 95 % interval, latency "
        "by length. A false hit is one on a question of another label.",
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=("replay",))
    parser.add_argument(
        "--blocks", action="append", default=[], type=Path, metavar="FILE", help="prompts as blocks, Mooncake's format"
    )
    parser.add_argument(
        "--capacity",
        type=_count,
        action="append",
        metavar="BLOCKS",
        help="of the prefix cache; 1000, 5000, 20000",
    )
    parser.add_argument(
        "--questions", action="append", default=[], type=Path, metavar="FILE", help="labelled ones, CLINC150's format"
    )
    parser.add_argument("--part", action="append", metavar="NAME", help="of a file of questions; default: test")
    parser.add_argument("--mode", choices=("shadow", "on"), default="on", help="of the semantic cache")
    parser.add_argument("--threshold", type=float, default=0.90, help="cosine that evidence is collected from")
    parser.add_argument("--cosine", action="store_true", help="beside it, what the threshold alone would do")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="of the embedder; default: the installed one")
    parser.add_argument("--limit", type=_count, metavar="COUNT", help="requests of each trace")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _blocks(path: Path, capacities: list[int] | None, limit: int | None) -> list[str]:
    requests = read_blocks(path)[:limit]
    if not requests:
        raise ValueError(f"{path}: no requests")
    found = lines(f"{path.name}: whole prompts", asyncio.run(replay_exact(requests, _exact())))
    for capacity in (*(capacities or (1000, 5000, 20_000)), None):
        report = replay_prefix(requests, LruBlocks(capacity))
        size = "all blocks" if capacity is None else f"{capacity} blocks"
        beyond = (
            f", {100 * report.rate_beyond_head:.2f} % beyond the first that all share" if report.shared_head else ""
        )
        found.append(f"{path.name}: prefixes, room for {size}: {100 * report.rate:.2f} % of blocks hit{beyond}")
    return found


async def _questions(path: Path, flags: argparse.Namespace) -> list[str]:
    questions = read_labelled(path, tuple(flags.part or ("test",)))[: flags.limit]
    if absent := missing(flags.model):
        raise ExportFailed(f"{', '.join(absent)} is not installed: in a checkout pip install -e '.[embed]'")
    embedder = open_embedder(exported(flags.model))
    settings = SemanticSettings(
        mode=Mode(flags.mode),
        threshold=flags.threshold,
        strict_threshold=min(SemanticSettings().strict_threshold, flags.threshold),
        max_entries=max(1, len(questions)),
    )
    # An hour passes between observations, because evidence counts a limited number per day and must be a day old.
    clock = itertools.count(0.0, 3600.0).__next__
    cache = SimilarCache(_context(), embedder, settings, clock=clock)
    try:
        found = lines(f"{path.name}: semantic, {flags.mode}", await replay_semantic(questions, cache, embedder))
    finally:
        await cache.aclose()
    if flags.cosine:
        report = replay_cosine(questions, embedder, flags.threshold)
        found += lines(f"{path.name}: cosine {flags.threshold:.2f} alone", report)
    return found


def _exact() -> ExactCache:
    return ExactCache(_context(), ResponseSettings())


def _context() -> CacheContext:
    counter, keyring, store = Counters(), Keyring.generate(), MemoryStore(_MEMORY)
    partitions = Partitions(keyring, ModelIdentity(weights="replay", tokenizer="replay"))
    return CacheContext(store, partitions, Epochs(store, partitions), Envelope(keyring, 1 << 20, counter), counter)


TENANT = "replay"
PATIENT = 5.0  # seconds a lookup may take: a replay measures, it does not serve
CALLERS = 8  # that a trace is spread over
LENGTHS = (8, 16, 24, 32, 48, 64, 128, 200)  # upper borders of buckets, in the embedder's tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HitReport:
    """Result for one trace: hits by kind, false ones among them, and lookups by length."""

    lookups: int
    hits: dict[str, int]  # verdict → count
    wrong: dict[str, int]
    outcomes: dict[str, int]  # every verdict, hits or not
    latency: dict[str, tuple[int, float, float]]  # most tokens → count, p50, p95 in seconds

    @property
    def rate(self) -> float:
        return sum(self.hits.values()) / self.lookups if self.lookups else 0.0

    @property
    def false_rate(self) -> tuple[float, float, float]:
        """Returns the share of false hits among the hits, with the bounds of its 95 % interval."""
        hits, wrong = sum(self.hits.values()), sum(self.wrong.values())
        return (wrong / hits if hits else 0.0, *interval(wrong, hits))


def interval(count: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Computes Wilson's interval of a share."""
    if total == 0:
        return 0.0, 1.0
    share = count / total
    middle = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


async def replay_exact(requests: Iterable[TraceRequest], cache: ResponseCache) -> HitReport:
    """Hits on whole prompts. The stored answer names its prompt, so that a false hit shows."""
    hits = wrong = lookups = 0
    for request in requests:
        ids = (*request.blocks, request.tokens)
        question = _question(ids)
        found = await cache.get(question, Allowance(PATIENT))
        lookups += 1
        if found is None:
            await cache.put(question, _answer(repr(ids)))
            continue
        hits += 1
        wrong += found.text != repr(ids)
    return HitReport(
        lookups=lookups,
        hits={"exact": hits},
        wrong={"exact": wrong},
        outcomes={"hit": hits, "miss": lookups - hits},
        latency={},
    )


async def replay_semantic(questions: Iterable[Labelled], cache: SemanticCache, embedder: Embedder) -> HitReport:
    """Asks each question once, by several callers in turn; its answer is its label, so that a hit on another label is a
    false one.

    In shadow mode a hit that would have been served counts as a hit. Every miss is generated, observed and stored.
    """
    hits: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    taken: dict[str, list[float]] = {}
    for number, question in enumerate(questions):
        asked = _question(tuple(question.text.encode()))
        turn = SemanticTurn(question=asked, context=b"", text=question.text, greedy=True, caller=str(number % CALLERS))
        begun = time.perf_counter()
        found = await cache.lookup(turn, Allowance(PATIENT))
        _bucket(taken, embedder.tokens(question.text)).append(time.perf_counter() - begun)
        verdict, fresh = found.verdict.value, _answer(question.intent)
        outcomes[verdict] += 1
        if verdict in ("strict", "learned") and found.candidate is not None:
            hits[verdict] += 1
            wrong[verdict] += found.candidate.completion.text != question.intent
            if not found.audit and found.served is not None:
                continue
        await cache.observe(turn, found, fresh)
        await cache.put(turn, fresh)
    return HitReport(
        lookups=sum(outcomes.values()),
        hits=dict(hits),
        wrong=dict(wrong),
        outcomes=dict(outcomes),
        latency={name: _summary(times) for name, times in taken.items()},
    )


def replay_cosine(questions: Iterable[Labelled], embedder: Embedder, threshold: float) -> HitReport:
    """Measures a static threshold, to compare with. Brute force."""
    rows: list[np.ndarray[Any, np.dtype[np.float32]]] = []
    intents: list[str] = []
    hits = wrong = lookups = 0
    matrix = np.empty((0, embedder.width), np.float32)
    for question in questions:
        lookups += 1
        vector = embedder.embed(question.text)
        if len(rows) > len(matrix) + 255:
            matrix = np.stack(rows)
        near = [*(matrix @ vector), *(float(row @ vector) for row in rows[len(matrix) :])]
        best = int(np.argmax(near)) if near else -1
        if best >= 0 and near[best] >= threshold:
            hits += 1
            wrong += intents[best] != question.intent
            continue
        rows.append(vector)
        intents.append(question.intent)
    outcomes = {"hit": hits, "miss": lookups - hits}
    return HitReport(lookups=lookups, hits={"cosine": hits}, wrong={"cosine": wrong}, outcomes=outcomes, latency={})


def lines(name: str, report: HitReport) -> list[str]:
    share, low, high = report.false_rate
    found = [f"{name}: {report.lookups} lookups, {100 * report.rate:.2f} % hits"]
    for kind, count in sorted(report.hits.items()):
        found.append(f"  {kind}: {count} hits, {report.wrong.get(kind, 0)} of them false")
    found.append(f"  false hits: {100 * share:.2f} % of hits (95 % interval {100 * low:.2f} to {100 * high:.2f} %)")
    found.append("  " + ", ".join(f"{verdict} {count}" for verdict, count in sorted(report.outcomes.items())))
    for border, (count, middle, high_) in sorted(report.latency.items()):
        found.append(f"  {border} tokens: {count} lookups, p50 {1e3 * middle:.2f} ms, p95 {1e3 * high_:.2f} ms")
    return found


def _question(ids: tuple[int, ...]) -> Question:
    return Question(tenant=TENANT, token_ids=ids, parameters=(), max_tokens=1 << 20, deterministic=True)


def _answer(text: str) -> CachedCompletion:
    ending = AnswerEnding(reason="stop", prompt_tokens=1, completion_tokens=1)
    return CachedCompletion(
        parts=(AnswerPart((1,), text, ending),), max_tokens=1 << 20, provenance="replay", created_at=time.time()
    )


def _bucket(taken: dict[str, list[float]], tokens: int) -> list[float]:
    border = next((f"≤ {border:3d}" for border in LENGTHS if tokens <= border), f"> {LENGTHS[-1]:3d}")
    return taken.setdefault(border, [])


def _summary(times: list[float]) -> tuple[int, float, float]:
    ordered = sorted(times)
    return len(ordered), ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


class ReplayIndex(Protocol):
    """Finds and keeps prefixes: `LruBlocks` here, the engine's own index in `bench.prefix`."""

    def match(self, blocks: Sequence[int]) -> int:
        pass

    def insert(self, blocks: Sequence[int]) -> None: ...


class LruBlocks:
    """Holds at most `capacity` blocks. The least recently used leaf goes first: a block counts as used after its
    children."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> int:
        count = next((i for i, block in enumerate(blocks) if block not in self._held), len(blocks))
        self._touch(blocks[:count])
        return count

    def insert(self, blocks: Sequence[int]) -> None:
        self._touch(blocks if self._capacity is None else blocks[: self._capacity])
        while self._capacity is not None and len(self._held) > self._capacity:
            self._held.popitem(last=False)

    def _touch(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._held[block] = None
            self._held.move_to_end(block)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReport:
    requests: int
    blocks: int
    hits: int
    shared_head: int  # hits on a first block that every request has

    @property
    def rate(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def rate_beyond_head(self) -> float:
        """Returns the rate without the first block of each request, where all requests share it."""
        rest = self.blocks - self.requests if self.shared_head else self.blocks
        return (self.hits - self.shared_head) / rest if rest else 0.0


def replay_prefix(requests: Sequence[TraceRequest], index: ReplayIndex) -> PrefixReport:
    heads = {request.blocks[0] for request in requests if request.blocks}
    hits = head_hits = blocks = 0
    for request in requests:
        found = index.match(request.blocks)
        index.insert(request.blocks)
        hits += found
        head_hits += len(heads) == 1 and found > 0
        blocks += len(request.blocks)
    return PrefixReport(requests=len(requests), blocks=blocks, hits=hits, shared_head=head_hits)


if __name__ == "__main__":
    sys.exit(main())
