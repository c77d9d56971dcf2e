"""What the metrics page of a running server tells."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from bench.redis_server import RedisServer
from service.observability.metric_names import FAMILIES
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.asked import QUESTION, chat, greedy, kept, learnt, loaded, probe, said
from tests.service.conftest import ROOT, Server, ask, ask_stream, refused
from tests.service.scraped import fetch, page_of, parsed, told, value

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]


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
        with ThreadPoolExecutor(4) as callers:
            for batch in range(30):  # four at once, of which three fail within a second on a machine however slow
                asked = [callers.submit(said, server, greedy(f"after it died {batch} {n}")) for n in range(4)]
                assert [one.result() for one in asked] == ["miss"] * 4
                page = page_of(server)
                opened = value(page, "cache_breaker_state", pool="small_reads") >= 1
                if opened and value(page, "cache_faults_total", kind="breaker") >= 1:
                    break
        assert value(page, "cache_requests_total", cache="response", outcome="fault") >= 3
        assert value(page, "cache_breaker_state", pool="small_reads") >= 1
        assert sum(count for (name, _), count in page.items() if name == "whippet_cache_faults_total") >= 3
        assert value(page, "cache_faults_total", kind="breaker") >= 1
