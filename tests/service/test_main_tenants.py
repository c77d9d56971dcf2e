"""Whole servers with a tenants file."""

from __future__ import annotations

import contextlib
import random
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

import grpc
import pytest

from bench.redis_server import RedisServer
from service.pb.whippet.v1 import admin_pb2
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.asked import greedy
from tests.service.conftest import Refusal, Server, ask, ask_stream, refused
from tests.service.tenants import metadata, write_tokens
from tests.waiting import wait_for

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
ACME = metadata("acme")
BRAVO = metadata("bravo")
RATE = 12_000  # tokens a minute: 200 a second
BURST = 1_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tenants")
    (made / "tenants.yaml").write_text("acme: {requests: 2}\n")
    write_tokens(made)
    return made


@pytest.fixture(scope="module")
def flags(folder: Path) -> list[str]:
    return [f"--auth.tokens-file={folder / 'tokens.yaml'}", f"--auth.tenants-file={folder / 'tenants.yaml'}"]


@pytest.fixture(scope="module")
def one(serve: Serve, flags: list[str]) -> Iterator[Server]:
    caching = ("--optimizations.response-cache=true", "--limits.tenant-requests=3")
    with serve(*flags, *caching, "--fake.step-time=0.002", "--scheduler.max-sequences=1") as server:
        yield server
        assert server.stop() == 0


def tenants(folder: Path, server: Server, text: str, outcome: str = "read") -> None:
    """Replaces the file, and waits until it was read."""
    before = reads(server, outcome)
    (folder / "new").write_text(text)
    (folder / "new").rename(folder / "tenants.yaml")
    wait_for(lambda: reads(server, outcome) > before)


def reads(server: Server, outcome: str) -> int:
    load = server.admin.GetLoad(admin_pb2.GetLoadRequest(), metadata=ACME, timeout=60)
    return load.cache_counts.get(f"tenants_file.{outcome}", 0)


def test_live_requests_of_a_tenant_and_a_file_that_is_wrong(one: Server, folder: Path) -> None:
    for caller, most in ((ACME, 2), (BRAVO, 3)):
        calls = [
            one.generation.GenerateStream(ask_stream(f"long {n}", 4000), metadata=caller, timeout=60)
            for n in range(most)
        ]
        wait_for(partial(has, one, most))
        refusal = refused(one.generation.GenerateStream, ask_stream("more", 1), metadata=caller)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_QUOTA")
        assert refusal.retry_ms > 0
        for call in calls:
            call.cancel()
        drained(one)
    tenants(folder, one, "acme: {requests: 0}", "invalid")
    assert "the old tenants stay in force: auth.tenants-file" in one.log.read_text()
    tenants(folder, one, "{}")


def busy(server: Server) -> int:
    """Requests that the engine has."""
    load = server.admin.GetLoad(admin_pb2.GetLoadRequest(), metadata=ACME, timeout=60)
    return load.running + load.waiting


def has(server: Server, requests: int) -> bool:
    return busy(server) == requests


def drained(server: Server) -> None:
    wait_for(lambda: not busy(server))


def test_tokens_of_prompt_and_answer_are_charged_and_what_a_cache_answers_is_not(one: Server, folder: Path) -> None:
    tenants(folder, one, "acme: {tokens-per-minute: 60, burst: 100}")

    def asked() -> str:
        reading = greedy("kept", 20)
        _, call = one.generation.Generate.with_call(reading, metadata=ACME, timeout=60)
        return str(dict(call.initial_metadata())["x-cache"])

    assert asked() == "miss"
    wait_for(lambda: asked() == "hit-response")
    for _ in range(50):
        assert asked() == "hit-response"
    one.generation.Generate(ask("x" * 40, 60), metadata=ACME, timeout=60)
    for request in (ask("y", 1), greedy("kept", 20)):
        refusal = refused(one.generation.Generate, request, metadata=ACME)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_TOKENS")
        assert 10_000 < refusal.retry_ms < 60_000, "24 tokens were owed, at one a second"
    one.generation.Generate(ask("y", 1), metadata=BRAVO, timeout=60)
    assert one.generation.Tokenize(pb.TokenizeRequest(text="free"), metadata=ACME, timeout=60).token_ids
    assert 'whippet_requests_refused_total{reason="TENANT_TOKENS"} 2.0' in scraped(one)


def scraped(server: Server) -> str:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as page:
        return str(page.read().decode())


def test_metrics_name_whom_the_file_lists(one: Server, folder: Path) -> None:
    tenants(folder, one, f"acme: {{tokens-per-minute: {RATE}, metrics: true}}\nbravo: {{tokens-per-minute: {RATE}}}\n")
    for caller in (ACME, BRAVO):
        one.generation.Generate(ask("named or not", 4), metadata=caller, timeout=60)

    wait_for(lambda: 'tenant_tokens_total{kind="generated",tenant="acme"} ' in scraped(one))
    text = scraped(one)
    assert 'tenant_requests_total{code="OK",tenant="acme"} ' in text
    assert 'tenant_requests_live{tenant="acme"} 0.0' in text
    assert 'tenant_tokens_left{tenant="acme"} ' in text
    assert "bravo" not in text
    tenants(folder, one, "acme: {requests: 2}\n")
    assert "acme" not in scraped(one)


def test_a_priority_beyond_the_tenants_is_lowered(one: Server, folder: Path) -> None:
    """One runs at a time: who waits is served by priority."""
    tenants(folder, one, "acme: {priority: background}")
    order: list[str] = []

    def wait(name: str, caller: tuple[tuple[str, str], ...], priority: pb.Priority) -> None:
        request = ask(f"{name} waits", 5, priority=priority)
        one.generation.Generate(request, metadata=caller, timeout=60)
        order.append(name)

    busy = one.generation.GenerateStream(ask_stream("busy", 4000), metadata=BRAVO, timeout=60)
    next(busy)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(wait, "acme", ACME, pb.PRIORITY_INTERACTIVE)
        wait_for(lambda: waiting(one) == 1)
        second = pool.submit(wait, "bravo", BRAVO, pb.PRIORITY_NORMAL)
        wait_for(lambda: waiting(one) == 2)
        busy.cancel()
        first.result()
        second.result()
    assert order == ["bravo", "acme"]


@pytest.fixture(scope="module")
def small(serve: Serve, folder: Path) -> Iterator[Server]:
    """One runs, and four may wait; nobody has a quota."""
    limits = ("--limits.queued-requests=4", "--scheduler.max-sequences=1", "--fake.step-time=0.005")
    with serve(f"--auth.tokens-file={folder / 'tokens.yaml'}", *limits) as server:
        yield server
        assert server.stop() == 0


def test_a_tenant_with_much_waiting_keeps_nobody_waiting_for_all_of_it_nor_shuts_him_out(small: Server) -> None:
    order: list[str] = []

    def wait(name: str, caller: tuple[tuple[str, str], ...]) -> str:
        try:
            small.generation.Generate(ask(name, 5), metadata=caller, timeout=60)
        except grpc.RpcError as error:
            refusal = Refusal.of(error)
            assert refusal.retry_ms > 0
            return refusal.reason
        order.append(name)
        return "served"

    busy = small.generation.GenerateStream(ask_stream("busy", 4000), metadata=ACME, timeout=60)
    next(busy)
    with ThreadPoolExecutor(5) as pool:
        mine = []
        for number in range(4):
            mine.append(pool.submit(wait, f"mine {number}", ACME))
            wait_for(lambda: waiting(small) == len(mine))
        assert refused(small.generation.Generate, ask("more", 1), metadata=ACME).reason == "QUEUE_FULL"
        other = pool.submit(wait, "other", BRAVO)
        assert mine[3].result() == "QUEUE_FULL", "the last of those who have most gave way"
        busy.cancel()
        assert [one.result() for one in (*mine[:3], other)] == ["served"] * 4
    assert order.index("other") < 2
    drained(small)


@pytest.mark.proof
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_who_waits_for_too_long_is_refused_and_his_place_is_free(serve: Serve, shared: bool) -> None:
    """Two ask the same; each has waited for as long when it is refused."""
    flags = ("--limits.queue-timeout=1", "--scheduler.max-sequences=1", "--fake.step-time=0.005")
    with serve(*flags, f"--optimizations.response-cache={str(shared).lower()}") as server:
        busy = server.generation.GenerateStream(ask_stream("busy", 4000), timeout=60)
        next(busy)
        with ThreadPoolExecutor(2) as pool:
            refusals = list(pool.map(lambda _: refused(server.generation.Generate, greedy("same", 5)), range(2)))
        for refusal in refusals:
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT")
            assert refusal.retry_ms > 0
        server.until(lambda load: (load.running, load.waiting) == (1, 0))
        busy.cancel()
        server.idle()
        stream = server.generation.GenerateStream(ask_stream("long", 200), timeout=60)
        assert [message for message in stream][-1].HasField("finish"), "one that has begun is not refused"


def waiting(server: Server) -> int:
    return int(server.admin.GetLoad(admin_pb2.GetLoadRequest(), metadata=ACME, timeout=60).waiting)


def begins(server: Server) -> bool:
    try:
        server.generation.Generate(ask("x", 1), metadata=ACME, timeout=60)
    except grpc.RpcError:
        return False
    return True


@pytest.mark.proof
def test_two_servers_keep_to_one_quota(
    serve: Serve, flags: list[str], folder: Path, make_redis: Callable[..., RedisServer]
) -> None:
    """Sixteen callers ask for some ten times of what the tenant has."""
    (folder / "tenants.yaml").write_text(f"acme: {{tokens-per-minute: {RATE}, burst: {BURST}}}\n")
    redis_server = make_redis()
    shared = (f"--cache.redis-url={redis_server.url}", "--cache.redis-budget=1", "--log-level=warning")
    with serve(*flags, *shared) as one, serve(*flags, *shared) as other:
        begun = time.monotonic()
        end = begun + 3.0

        def flood(number: int) -> int:
            server, used, draw = (one, other)[number % 2], 0, random.Random(number)
            while time.monotonic() < end:
                try:
                    answer = server.generation.Generate(ask("x" * 10, draw.randint(5, 35)), metadata=ACME, timeout=60)
                    used += answer.finish.usage.prompt_tokens + answer.finish.usage.completion_tokens
                except grpc.RpcError as error:
                    refusal = Refusal.of(error)
                    assert refusal.reason == "TENANT_TOKENS", refusal
                    Event().wait(0.02)  # the pace of this caller
            return used

        with ThreadPoolExecutor(16) as pool:
            used = list(pool.map(flood, range(16)))
        allowed = BURST + RATE / 60 * (time.monotonic() - begun)
        assert 0.6 * allowed < sum(used) <= 1.05 * allowed, f"{used} of {allowed:.0f}"
        redis_server.command("FLUSHALL")
        wait_for(lambda: begins(one))  # a bucket that is lost is a full one
        redis_server.stop()
        for server in (one, other):
            wait_for(lambda server=server: all(begins(server) for _ in range(9)))  # each keeps to the quota for itself
        assert "Traceback" not in one.log.read_text() + other.log.read_text()
