"""Traces through the caches: hit rates by kind, how many hits were false, and what a lookup takes.

A rate of hits is never reported without the rate of false ones among them and its interval.
"""

from __future__ import annotations

import gzip
import json
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cache.api import (
    Allowance,
    AnswerEnding,
    AnswerPart,
    CachedCompletion,
    Question,
    ResponseCache,
    SemanticCache,
    Turn,
)
from cache.semantic.embedder import Embedder

TENANT = "replay"
PATIENT = 5.0  # seconds a lookup may take: a replay measures, it does not serve
LENGTHS = (8, 16, 24, 32, 48, 64, 128, 200)  # upper borders of buckets, in the embedder's tokens


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a block trace: equal numbers are equal blocks with equal prefixes."""

    blocks: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Labelled:
    """A question, and what it asks for."""

    text: str
    intent: str


def read_blocks(path: Path) -> list[TraceRequest]:
    """Mooncake's format, one JSON object a line. Raises ValueError."""
    rows = (json.loads(line) for line in _text(path).splitlines() if line.strip())
    try:
        return [TraceRequest(tuple(map(int, row["hash_ids"])), int(row["input_length"])) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a block trace: {error}") from None


def read_labelled(path: Path, parts: Sequence[str] = ("test",)) -> list[Labelled]:
    """CLINC150's format: {part: [[text, intent], …]}. Raises ValueError."""
    try:
        found: Any = json.loads(_text(path))
        return [Labelled(str(text), str(intent)) for part in parts for text, intent in found[part]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a set of labelled questions: {error}") from None


def _text(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()


class PrefixIndex(Protocol):
    """What finds and keeps prefixes: `LruBlocks` here, an engine's own elsewhere."""

    def match(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are held."""

    def insert(self, blocks: Sequence[int]) -> None: ...


class LruBlocks:
    """So many blocks, the least recently used leaf goes first: a block is always used after its children."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> int:
        """As the protocol says."""
        count = next((i for i, block in enumerate(blocks) if block not in self._held), len(blocks))
        self._touch(blocks[:count])
        return count

    def insert(self, blocks: Sequence[int]) -> None:
        """As the protocol says."""
        self._touch(blocks if self._capacity is None else blocks[: self._capacity])
        while self._capacity is not None and len(self._held) > self._capacity:
            self._held.popitem(last=False)

    def _touch(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._held[block] = None
            self._held.move_to_end(block)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReport:
    """Of one trace and one capacity."""

    requests: int
    blocks: int
    hits: int
    shared_head: int  # hits on a first block that every request has

    @property
    def rate(self) -> float:
        """Blocks found, of all."""
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def rate_beyond_head(self) -> float:
        """The same without the first block of each request, where that is one and the same."""
        rest = self.blocks - self.requests if self.shared_head else self.blocks
        return (self.hits - self.shared_head) / rest if rest else 0.0


def replay_prefix(requests: Sequence[TraceRequest], index: PrefixIndex) -> PrefixReport:
    """One after the other, each inserted after it was looked for."""
    heads = {request.blocks[0] for request in requests if request.blocks}
    hits = head_hits = blocks = 0
    for request in requests:
        found = index.match(request.blocks)
        index.insert(request.blocks)
        hits += found
        head_hits += len(heads) == 1 and found > 0
        blocks += len(request.blocks)
    return PrefixReport(requests=len(requests), blocks=blocks, hits=hits, shared_head=head_hits)


@dataclass(frozen=True, slots=True, kw_only=True)
class HitReport:
    """Of one trace: hits by kind, false ones among them, and lookups by length."""

    lookups: int
    hits: dict[str, int]  # verdict → count
    wrong: dict[str, int]
    outcomes: dict[str, int]  # every verdict, hits or not
    latency: dict[str, tuple[int, float, float]]  # up to so many tokens → count, p50, p95 in seconds

    @property
    def rate(self) -> float:
        """Hits of lookups."""
        return sum(self.hits.values()) / self.lookups if self.lookups else 0.0

    @property
    def false_rate(self) -> tuple[float, float, float]:
        """False ones of the hits, with the borders of the 95 % interval."""
        hits, wrong = sum(self.hits.values()), sum(self.wrong.values())
        return (wrong / hits if hits else 0.0, *interval(wrong, hits))


def interval(count: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's, of a share."""
    if total == 0:
        return 0.0, 1.0
    share = count / total
    middle = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


async def replay_exact(requests: Iterable[TraceRequest], cache: ResponseCache) -> HitReport:
    """A whole prompt that comes again. An answer names its prompt, so that a false hit shows."""
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
    """Each question once; its answer is its label, so that a hit on another label is a false one.

    In shadow mode what would have been served counts as a hit. Every miss is generated, observed and stored.
    """
    hits: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    taken: dict[str, list[float]] = {}
    for question in questions:
        turn = Turn(question=_question(tuple(question.text.encode())), context=b"", text=question.text, greedy=True)
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
        await cache.observe(found, fresh)
        await cache.put(turn, fresh)
    return HitReport(
        lookups=sum(outcomes.values()),
        hits=dict(hits),
        wrong=dict(wrong),
        outcomes=dict(outcomes),
        latency={name: _summary(times) for name, times in taken.items()},
    )


def replay_cosine(questions: Iterable[Labelled], embedder: Embedder, threshold: float) -> HitReport:
    """What a static threshold would do: the anchor to compare with. Brute force."""
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
    """A report for reading."""
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
