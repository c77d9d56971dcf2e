"""The metrics page: it names everything that is counted, tells what happened, and nobody can hold it up."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from bench.redis_server import RedisServer
from cache.api import CacheOptions, Mode, SemanticOptions
from engine.api import EngineLoad, EngineState, TierReport
from service.config.settings import BadSettings, LimitOptions, OptimizationOptions
from service.config.sources import load
from service.core.admission import Admission
from service.core.answers.caches import AnswerCaches
from service.core.switches import Switches
from service.observability import scrape
from service.observability.instruments import Instruments
from service.observability.metric_names import EVENTS, FAMILIES, TIMES
from service.observability.metrics import Metrics
from service.observability.scrape import MetricsPort
from service.pb.whippet.v1 import generation_pb2 as pb
from service.transport.identity import Identity
from service.transport.ports import PortTaken
from tests.service.asked import QUESTION, chat, greedy, kept, learnt, loaded, probe, said
from tests.service.conftest import PATIENCE, ROOT, Server, ask, ask_stream, refused
from tests.service.scripted import ScriptedEngine

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
Page = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def fetch(url: str, accept: str = "") -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=60) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


def parsed(text: str) -> Page:
    """Read by the library's own parser, and held to what Prometheus expects of names."""
    page: Page = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        assert family.name.startswith(("whippet_", "process_")), family.name
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total"), sample.name
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in page, key
            page[key] = sample.value
    return page


def page_of(server: Server) -> Page:
    match = re.search(r"^metrics: (\S+)$", server.log.read_text(), re.MULTILINE)
    assert match
    return parsed(fetch(match[1]))


def value(page: Page, name: str, **labels: str) -> float:
    return page.get((f"whippet_{name}", tuple(sorted(labels.items()))), 0.0)


def told(server: Server, name: str, least: float, within: float = PATIENCE, **labels: str) -> float:
    """Waits until there is as much."""
    end = time.monotonic() + within
    while (found := value(page_of(server), name, **labels)) < least:
        assert time.monotonic() < end, (name, labels, found)
        time.sleep(0.05)
    return found


# Names


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


def test_the_manual_knows_every_name() -> None:
    """As the first column of its table has them, with the labels of the second."""
    manual = (ROOT / "docs" / "operations.md").read_text()
    section = manual[manual.index("## Metrics") : manual.index("### Names elsewhere")]
    told: dict[str, list[str]] = {}
    for names, labels in re.findall(r"(?m)^\| (`[^|]*) \| ([^|]*) \|", section):
        of_each = labels.split(" · ")
        for number, name in enumerate(re.findall(r"`([a-z0-9_]+)`", names)):
            told[name] = re.findall(r"`([a-z_]+)`", of_each[min(number, len(of_each) - 1)])
    shown = {
        f"{name}_total" if family.kind == "counter" else name: sorted(family.labels)
        for name, family in FAMILIES.items()
    }
    assert len(shown) > 40
    assert {name: sorted(labels) for name, labels in told.items()} == shown


@pytest.fixture
async def metrics() -> AsyncIterator[tuple[Metrics, AnswerCaches, ScriptedEngine]]:
    engine = ScriptedEngine([])
    caches = AnswerCaches(CacheOptions(semantic=SemanticOptions(mode=Mode.OFF)), engine, "")
    caches.now()
    switches = Switches(OptimizationOptions(), engine)
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


# The port


@pytest.fixture
async def port() -> AsyncIterator[MetricsPort]:
    one = MetricsPort("metrics-listen", "127.0.0.1:0", lambda: [])
    await one.start()
    yield one
    await one.stop()


async def exchange(port: MetricsPort, request: bytes) -> bytes:
    host, _, number = port.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /metrics?name=a HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\r\nno colon\r\n: \r\n\r\n", 200),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"\xff\xfe\r\n\r\n", 404),
        (b"\r\n\r\n", 404),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 10_000 + b"\r\n\r\n", 431),
    ],
)
async def test_what_is_asked_and_answered(port: MetricsPort, request_: bytes, code: int) -> None:
    answer = await exchange(port, request_)
    assert answer.startswith(b"HTTP/1.1 %d " % code)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert (b"process_" in body) == (code == 200)


async def test_head_has_no_body(port: MetricsPort) -> None:
    head, _, body = (await exchange(port, b"HEAD /metrics HTTP/1.1\r\n\r\n")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body == b""


async def test_openmetrics_where_it_is_asked_for(port: MetricsPort) -> None:
    text = await asyncio.to_thread(
        fetch, f"http://{port.address}/metrics", "application/openmetrics-text;version=1.0.0"
    )
    assert list(openmetrics.text_string_to_metric_families(text))


async def test_who_is_silent_holds_nobody_up(port: MetricsPort) -> None:
    """Three times as many as there is room for: those that came first go, and a scrape is answered as ever."""
    host, _, number = port.address.rpartition(":")
    silent = [await asyncio.open_connection(host, int(number)) for _ in range(3 * scrape._MAX_CONNECTIONS)]
    for _ in range(5):
        assert b" 200 " in await exchange(port, b"GET /metrics HTTP/1.1\r\n\r\n")
    gone = [reader for reader, _ in silent[: 2 * scrape._MAX_CONNECTIONS]]
    assert await asyncio.wait_for(asyncio.gather(*(end_of(reader) for reader in gone)), 60) == [b""] * len(gone)
    for _, writer in silent:
        writer.close()


async def end_of(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


async def test_who_stays_silent_is_hung_up_on(port: MetricsPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_TIMEOUT_HEAD", 0.05)
    host, _, number = port.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text; version=one",
        "application/openmetrics-text;version=1.0.0;escaping=nothing",
        "application/openmetrics-text; version=9999999999.1",
        "text/plain; version=; escaping=",
        "text/plain; version=-1",
        "application/openmetrics-text; version=1.0.0\n X: injected",
        "\xff\xfe",
        ";;;,,,===",
    ],
)
async def test_an_odd_accept_header_gets_a_page(port: MetricsPort, accept: str) -> None:
    head = f"GET /metrics HTTP/1.1\r\nAccept: {accept}\r\n\r\n".encode("latin-1")
    answer = await exchange(port, head)
    assert b" 200 " in answer.splitlines()[0]
    assert b"injected" not in answer


async def test_what_breaks_while_reading_is_500(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> list[object]:
        raise RuntimeError("no")

    port = MetricsPort("metrics-listen", "127.0.0.1:0", broken)  # type: ignore[arg-type]
    await port.start()
    assert b" 500 " in await exchange(port, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert "could not be read" in caplog.text
    await port.stop()


async def test_stopping_ends_what_is_under_way(port: MetricsPort) -> None:
    host, _, number = port.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(port.stop(), 60)
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(number))


def test_ports_that_cannot_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PortTaken, match=address):
            MetricsPort("metrics-listen", address, lambda: [])
    with pytest.raises(BadSettings, match="metrics-listen"):
        MetricsPort("metrics-listen", "no-such-host.invalid:0", lambda: [])


# A server


def promtool() -> str:
    found = shutil.which("promtool") or ROOT / ".tools" / "promtool"
    assert Path(found).exists(), "`make test` fetches promtool"
    return str(found)


def test_prometheus_takes_the_page_of_a_server_with_traffic(server: Server) -> None:
    """By its own parser and linter; whatever is shown has its line in the table of names."""
    before = page_of(server)
    server.generation.Generate(ask("one", 4), timeout=60)
    list(server.generation.GenerateStream(ask_stream("two", 60), timeout=60))
    assert refused(server.generation.Generate, ask("x", 0)).code is grpc.StatusCode.INVALID_ARGUMENT
    strange = server.channel.unary_unary("/whippet.v1.GenerationService/Secret")
    assert refused(strange, b"").code is grpc.StatusCode.UNIMPLEMENTED
    strangers = value(before, "requests_total", method="unknown", code="UNIMPLEMENTED")
    told(server, "requests_total", strangers + 1, method="unknown", code="UNIMPLEMENTED")
    text = fetch(f"http://{server.metrics}/metrics")
    checked = subprocess.run([promtool(), "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", ""), checked
    assert "Secret" not in text
    page = parsed(text)
    for name, _ in page:
        base = re.sub(r"_(total|bucket|sum|count|created)$", "", name.removeprefix("whippet_"))
        assert name.startswith("process_") or base in FAMILIES, name

    def more(name: str, **labels: str) -> float:
        return value(page, name, **labels) - value(before, name, **labels)

    service = "whippet.v1.GenerationService"
    assert more("requests_total", method=f"{service}/Generate", code="OK") == 1
    assert more("requests_total", method=f"{service}/GenerateStream", code="OK") == 1
    assert more("requests_total", method=f"{service}/Generate", code="INVALID_ARGUMENT") == 1
    assert more("requests_total", method="unknown", code="UNIMPLEMENTED") == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert more(f"{name}_count", cache="none") == 2
        assert more(f"{name}_sum", cache="none") > 0
    assert more("request_prompt_tokens_sum") == 6
    assert more("request_generation_tokens_sum") == 64
    assert more("request_queue_time_seconds_count") == more("request_decode_time_seconds_count") == 2
    assert more("inter_token_latency_seconds_count") >= 4
    assert value(page, "limits", kind="sequences") == 8
    assert value(page, "limits", kind="waiting") == 256
    assert value(page, "event_loop_lag_seconds_count") > 0


def test_off(serve: Serve) -> None:
    with serve("--metrics-listen=") as server:
        assert "metrics:" not in server.log.read_text()
        assert server.generation.Generate(ask("x", 1), timeout=60).text


@pytest.mark.usefixtures("exported_embedder")
def test_misses_hits_and_vetoes(serve: Serve) -> None:
    with serve("--optimizations.response-cache=true", "--cache.semantic.mode=on", "--cache.semantic.audit=0") as server:
        loaded(server)
        before = page_of(server)
        request = greedy("mentioned nowhere")
        assert said(server, request) == "miss"
        kept(server, request)
        learnt(server, chat(QUESTION))
        said(server, probe("How do I reset my password with 2 keys?"))
        after = page_of(server)

        def more(name: str, **labels: str) -> float:
            return value(after, name, **labels) - value(before, name, **labels)

        for outcome in ("hit", "miss"):
            assert more("cache_requests_total", cache="response", outcome=outcome) >= 1
            assert more("cache_requests_total", cache="semantic", outcome=outcome) >= 1
        assert more("semantic_vetoes_total", rule="numbers") == 1
        assert more("semantic_lookups_total", verdict="vetoed") == 1
        assert more("cache_lookup_seconds_count", cache="semantic") >= 2
        assert value(after, "cache_bytes", store="memory") > value(before, "cache_bytes", store="memory")
        assert value(after, "generated_tokens_total") > 8
        assert value(after, "engine_state", state="ready") == 1
        # The admin port tells the same.
        counts = server.load().cache_counts
        assert counts["response_lookup.hit"] == value(
            page_of(server), "cache_requests_total", cache="response", outcome="hit"
        )
        text = repr(after)
        assert not any(word in text for word in ("mentioned", "password", "default"))


def test_a_redis_that_dies(serve: Serve, make_redis: Callable[..., RedisServer], key_file: Path) -> None:
    redis = make_redis()
    flags = (f"--cache.redis-url={redis.url}", f"--cache.key-file={key_file}", "--cache.prefix.chunk-bytes=4096")
    flags += ("--cache.redis-budget=1",)  # it is about what, not when
    with serve("--optimizations.response-cache=true", "--fake.step-time=0.05", *flags) as server:
        ids = pb.TokenIds(ids=[1 + n * n % 251 for n in range(1100)])
        for _ in range(2):
            server.generation.Generate(
                ask(token_ids=ids, tokens=4, cache=pb.CacheOptions(response=pb.CACHE_MODE_OFF)), timeout=60
            )
        said(server, greedy("while it lives"))
        written = told(server, "prefix_chunks_written_total", 1)
        assert told(server, "prefix_chunk_bytes_total", written * 4096 / 2, direction="written")
        page = page_of(server)
        assert value(page, "cache_requests_total", cache="prefix", outcome="hit") >= 1
        assert value(page, "cache_requests_total", cache="response", outcome="fault") == 0
        pools = {key[1][0][1] for key in page if key[0] == "whippet_cache_breaker_state"}
        assert {"small_reads", "bulk_writes", "block_reads"} <= pools
        assert value(page, "cache_breaker_state", pool="small_reads") == 0
        redis.stop()
        for number in range(6):
            assert said(server, greedy(f"after it died {number}")) == "miss"
        page = page_of(server)
        assert value(page, "cache_requests_total", cache="response", outcome="fault") >= 3
        assert value(page, "cache_breaker_state", pool="small_reads") == 2
        assert sum(count for (name, _), count in page.items() if name == "whippet_cache_faults_total") >= 3
        assert value(page, "cache_faults_total", kind="breaker") >= 1
