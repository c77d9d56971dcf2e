"""Traces through the caches of answers: hit rates by kind, how many hits were false, and what a lookup takes.

A rate of hits is never reported without the rate of false ones among them and its interval.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.replay.traces import Labelled, TraceRequest
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
CALLERS = 8  # that a trace is spread over
LENGTHS = (8, 16, 24, 32, 48, 64, 128, 200)  # upper borders of buckets, in the embedder's tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HitReport:
    """Result for one trace: hits by kind, false ones among them, and lookups by length."""

    lookups: int
    hits: dict[str, int]  # verdict → count
    wrong: dict[str, int]
    outcomes: dict[str, int]  # every verdict, hits or not
    latency: dict[str, tuple[int, float, float]]  # up to so many tokens → count, p50, p95 in seconds

    @property
    def rate(self) -> float:
        return sum(self.hits.values()) / self.lookups if self.lookups else 0.0

    @property
    def false_rate(self) -> tuple[float, float, float]:
        """Share of false hits among the hits, with the bounds of its 95 % interval."""
        hits, wrong = sum(self.hits.values()), sum(self.wrong.values())
        return (wrong / hits if hits else 0.0, *interval(wrong, hits))


def interval(count: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share."""
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
    """Each question once, by several callers in turn; its answer is its label, so that a hit on another label is a
    false one.

    In shadow mode what would have been served counts as a hit. Every miss is generated, observed and stored.
    """
    hits: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    taken: dict[str, list[float]] = {}
    for number, question in enumerate(questions):
        asked = _question(tuple(question.text.encode()))
        turn = Turn(question=asked, context=b"", text=question.text, greedy=True, caller=str(number % CALLERS))
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
    """What a static threshold would do, to compare with. Brute force."""
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
    """The report as lines of text."""
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
