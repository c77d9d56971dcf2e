"""The metrics page: it names everything that is counted, and tells what happened."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import AsyncIterator

import pytest

from cache.api import CacheOptions, Mode, SemanticOptions
from engine.api import EngineLoad, EngineState, TierReport
from service.config.settings import LimitOptions, OptimizationOptions
from service.config.sources import load
from service.core.admission.admission import Admission
from service.core.answers.caches import AnswerCaches
from service.core.switches import OptimizationSwitches
from service.observability.instruments import Instruments
from service.observability.metric_names import EVENTS, FAMILIES, TIMES
from service.observability.metrics import Metrics
from service.observability.scrape import MetricsPort
from service.transport.identity.identity import Identity
from tests.service.conftest import ROOT
from tests.service.scraped import Page, fetch, parsed, value
from tests.service.scripted import ScriptedEngine


def counted() -> tuple[set[str], set[str]]:
    """Every event that the sources count, and every one that they time."""
    events: dict[str, set[str]] = {"count": set(), "observe": set()}
    for path in sorted([*(ROOT / "cache").rglob("*.py"), *(ROOT / "service").rglob("*.py")]):
        tree = ast.parse(path.read_text())
        calls = {node.func: node.args for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in events and "counter" in ast.unparse(node.value):
                first = calls[node][0]  # KeyError: it is handed on, and who knows what is counted then
                assert isinstance(first, ast.Constant), f"{path}: an event has no name of its own"
                events[node.attr].add(str(first.value))
    return events["count"], events["observe"]


def test_every_event_has_a_name_and_every_name_an_event() -> None:
    counts, times = counted()
    assert len(counts) > 20
    assert counts == set(EVENTS)
    assert times == set(TIMES)
    for shown in EVENTS.values():
        labels = {name for name, _ in shown.fixed} | ({shown.label} if shown.label else set())
        assert labels == set(FAMILIES[shown.family].labels), shown
        assert all(re.fullmatch(r"[a-z_]+", name) for name in (shown.family, *labels))
    for name, family in FAMILIES.items():
        assert family.help.endswith("."), name


@pytest.fixture
async def metrics() -> AsyncIterator[tuple[Metrics, AnswerCaches, ScriptedEngine]]:
    engine = ScriptedEngine([])
    caches = AnswerCaches(CacheOptions(semantic=SemanticOptions(mode=Mode.OFF)), engine, "")
    caches.now()
    switches = OptimizationSwitches(OptimizationOptions(), engine)
    admission = Admission(LimitOptions(), lambda: 8)
    identity = Identity(load(["--engine=fake"], {}))
    yield Metrics(engine, admission, caches, switches, 'a "name"\n', Instruments(), identity), caches, engine
    await caches.aclose()


async def told_by(metrics: Metrics) -> Page:
    port = MetricsPort("metrics-listen", "127.0.0.1:0", metrics.families)
    await port.start()
    try:
        return parsed(await asyncio.to_thread(fetch, f"http://{port.address}/metrics"))
    finally:
        await port.stop()


async def test_an_event_without_a_name_is_not_lost(metrics: tuple[Metrics, AnswerCaches, ScriptedEngine]) -> None:
    metrics[1].counters.count("newcomer", "odd", 3)
    page = await told_by(metrics[0])
    assert value(page, "unnamed_events_total", event="newcomer.odd") == 3
    assert (
        value(
            page,
            "model_info",
            model='a "name"\n',
            **dict.fromkeys(("architecture", "weight_format", "dtype", "device", "decoder"), "x"),
        )
        == 1
    )


async def test_what_the_engine_counted(metrics: tuple[Metrics, AnswerCaches, ScriptedEngine]) -> None:
    page, caches, engine = metrics
    engine.load = EngineLoad(
        running=3, waiting=2, used_pages=10, kept_pages=5, total_pages=40, begun=7, begun_cached=2,
        prompt_tokens=100, cached_tokens=30,
        tier=TierReport(
            counts=(("block_chunks", "hit", 4), ("block_gate", "slower", 6), ("block_bytes", "written", 1000),
                    ("block_rejected", "seal", 1), ("block_write_dropped", "", 2)),
            times=(("block_fetch", (0, 1, *([0] * 12)), 0.0002),),
            breakers=(("block_reads", "open"),),
        ),
    )  # fmt: skip
    told = await told_by(page)
    assert value(told, "kv_cache_usage_ratio") == 0.25
    assert [value(told, "engine_pages", state=s) for s in ("used", "kept", "free")] == [10, 5, 25]
    assert [value(told, "engine_sequences", state=s) for s in ("running", "waiting", "paused")] == [3, 2, 0]
    assert value(told, "cache_requests_total", cache="prefix", outcome="hit") == 2
    assert value(told, "cache_requests_total", cache="prefix", outcome="miss") == 5
    assert value(told, "prompt_cached_tokens_total") == 30
    assert value(told, "prefix_chunks_total", outcome="hit") == 4
    assert value(told, "prefix_gate_total", decision="slower") == 6
    assert value(told, "prefix_chunk_bytes_total", direction="written") == 1000
    assert value(told, "prefix_rejected_total", reason="seal") == 1
    assert value(told, "prefix_writes_lost_total", reason="dropped") == 2
    assert value(told, "cache_breaker_state", pool="block_reads") == 2
    assert value(told, "cache_lookup_seconds_bucket", cache="prefix", le="0.0001") == 0
    assert value(told, "cache_lookup_seconds_bucket", cache="prefix", le="+Inf") == 1
    assert caches.named_counts()["block_chunks.hit"] == 4
    assert caches.breakers() == {"block_reads": "open"}


async def test_before_anything_is_loaded(metrics: tuple[Metrics, AnswerCaches, ScriptedEngine]) -> None:
    page, _, engine = metrics
    engine.info, engine.state, engine.load = None, EngineState.LOADING, EngineLoad()  # type: ignore[assignment]
    told = await told_by(page)
    assert value(told, "engine_state", state="loading") == 1
    assert not any(name == "whippet_model_info" for name, _ in told)
