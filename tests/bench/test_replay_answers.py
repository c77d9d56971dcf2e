"""Replays against simulations written anew, on excerpts of two public traces (Mooncake's conversations, CLINC150)."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bench.replay import LruBlocks, interval, lines, replay_cosine, replay_exact, replay_prefix, replay_semantic
from bench.workloads import Labelled, TraceRequest, read_blocks, read_labelled
from cache.answers.exact import ExactCache
from cache.api import Mode, ModelIdentity, ResponseSettings, SemanticSettings
from cache.open.counters import Counters
from cache.seal.context import CacheContext
from cache.seal.envelope import Envelope
from cache.seal.keyring import Keyring
from cache.seal.partition import Epochs, Partitions
from cache.semantic.embedder import ModelEmbedder
from cache.semantic.search import SimilarCache
from cache.store.memory import MemoryStore

DATA = Path(__file__).parent / "data"


@pytest.fixture
def context() -> CacheContext:
    store, keyring, counters = MemoryStore(256 * 2**20), Keyring.generate(), Counters()
    partitions = Partitions(keyring, ModelIdentity(weights="w", tokenizer="t"))
    return CacheContext(store, partitions, Epochs(store, partitions), Envelope(keyring, 1 << 20, counters), counters)


def simulated(requests: list[TraceRequest], capacity: int) -> tuple[int, int]:
    """A tree of blocks with times of use; the leaf unused for longest goes first. Quadratic, and written apart."""
    parent: dict[int, int | None] = {}
    used: dict[int, int] = {}
    hits = 0
    for now, request in enumerate(requests):
        blocks = request.blocks
        found = 0
        while found < len(blocks) and blocks[found] in used:
            found += 1
        hits += found
        for place, block in enumerate(blocks[:capacity]):
            parent[block] = blocks[place - 1] if place else None
            used[block] = now
        while len(used) > capacity:
            inner = {parent[block] for block in used}
            leaves = [block for block in used if block not in inner]
            del used[min(leaves, key=lambda block: (used[block], -request_depth(block, parent)))]
    return hits, sum(len(request.blocks) for request in requests)


def request_depth(block: int, parent: dict[int, int | None]) -> int:
    depth = 0
    above = parent.get(block)
    while above is not None:
        depth, above = depth + 1, parent.get(above)
    return depth


@pytest.mark.parametrize("capacity", [50, 400])
def test_prefix_hits_are_those_of_another_simulation(capacity: int) -> None:
    requests = read_blocks(DATA / "mooncake_600.jsonl.gz")[:120]
    report = replay_prefix(requests, LruBlocks(capacity))
    hits, blocks = simulated(requests, capacity)
    assert report.blocks == blocks
    assert report.rate == pytest.approx(hits / blocks, abs=0.005)


def test_more_room_is_more_hits_and_none_beyond_what_repeats() -> None:
    requests = read_blocks(DATA / "mooncake_600.jsonl.gz")
    rates = [replay_prefix(requests, LruBlocks(size)).rate for size in (100, 1000, 5000, None)]
    assert rates == sorted(rates)
    seen: set[int] = set()
    repeats = sum(block in seen or seen.add(block) is not None for request in requests for block in request.blocks)
    total = sum(len(request.blocks) for request in requests)
    assert rates[-1] == pytest.approx(repeats / total)
    unlimited = replay_prefix(requests, LruBlocks(None))
    assert unlimited.rate_beyond_head < unlimited.rate  # every request begins with the same block


async def test_exact_hits_are_the_repeated_prompts(context: CacheContext) -> None:
    requests = read_blocks(DATA / "mooncake_600.jsonl.gz")[:300]
    requests += random.Random(1).sample(requests, 30)
    report = await replay_exact(requests, ExactCache(context, ResponseSettings()))
    assert report.lookups == 330
    assert report.hits["exact"] == 330 - len({(request.blocks, request.tokens) for request in requests})
    assert report.false_rate[0] == 0


@pytest.fixture
async def similar(context: CacheContext, embedder: ModelEmbedder) -> AsyncIterator[SimilarCache]:
    cache = SimilarCache(context, embedder, SemanticSettings(mode=Mode.ON, audit=0.0))
    yield cache
    await cache.aclose()


@pytest.mark.proof
async def test_semantic_hits_and_false_ones(similar: SimilarCache, embedder: ModelEmbedder) -> None:
    questions = read_labelled(DATA / "clinc_500.json")[:250]
    again = [Labelled(question.text.replace(" ", "  ", 1), question.intent) for question in questions[:50]]
    traps = [Labelled(question.text + " not", "other") for question in questions[:50]]
    report = await replay_semantic(questions + again + traps, similar, embedder)
    assert report.lookups == 350
    assert report.hits["strict"] >= 35
    assert sum(report.wrong.values()) == 0
    assert sum(report.outcomes.values()) == 350
    assert sum(count for count, _, _ in report.latency.values()) == 350
    assert report.outcomes["vetoed"] >= 35
    text = "\n".join(lines("semantic", report))
    assert "false hits: 0.00 % of hits (95 % interval 0.00 to" in text
    assert "p95" in text


def test_the_anchor_serves_false_ones(embedder: ModelEmbedder) -> None:
    questions = [Labelled("enable dark mode", "on"), Labelled("disable dark mode", "off")]
    report = replay_cosine(questions, embedder, 0.7)
    assert (report.hits, report.wrong) == ({"cosine": 1}, {"cosine": 1})
    assert replay_cosine(questions, embedder, 0.999).hits == {"cosine": 0}


@pytest.mark.parametrize(("count", "total"), [(0, 150), (1, 40), (20, 40), (7, 7)])
def test_intervals_are_wilsons(count: int, total: int) -> None:
    from scipy.stats import binomtest  # a second that other tests need not pay

    expected = binomtest(count, total).proportion_ci(0.95, "wilson")
    assert interval(count, total) == pytest.approx((expected.low, expected.high), abs=1e-4)
    assert interval(0, 0) == (0.0, 1.0)


def test_other_files_are_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match="not a block trace"):
        read_blocks(wrong)
    with pytest.raises(ValueError, match="not a set of labelled"):
        read_labelled(wrong)
