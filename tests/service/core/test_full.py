"""A server whose queue is full: what needs no place is served, what needs one is refused in time to be tried again."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import cast

import grpc
import pytest

from bench.redis_server import RedisServer
from service.pb.whippet.v1 import admin_pb2, generation_pb2_grpc
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.asked import (
    ALIKE,
    QUESTION,
    as_stream,
    chat,
    generate,
    greedy,
    kept,
    learnt,
    loaded,
    probe,
    said,
)
from tests.service.conftest import PATIENCE, Refusal, Server, refused
from tests.service.scraped import page_of, told, value
from tests.waiting import wait_for

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
LONG = 3000  # tokens
FLAGS = ("--optimizations.response-cache=true", "--fake.step-time=0.01", "--scheduler.max-sequences=2")


@pytest.fixture(scope="module")
def narrow(serve: Serve) -> Iterator[Server]:
    """Two run and one waits."""
    with serve(*FLAGS, "--limits.queued-requests=1") as one:
        yield one
        one.idle()
        page = page_of(one)
        assert [value(page, "generations", state=state) for state in ("running", "waiting")] == [0, 0]
        assert value(page, "requests_live") == value(page, "requests_looking") == 0
        assert one.stop() == 0, one.log.read_text()


@contextlib.contextmanager
def full(server: Server, count: int = 3) -> Iterator[list[pb.GenerateRequest]]:
    """So many long answers under way."""
    requests = [greedy(f"busy {n} {time.monotonic()}", LONG) for n in range(count)]
    calls = [server.generation.GenerateStream(as_stream(request), timeout=60) for request in requests]
    server.until(lambda load: load.running + load.waiting == count)
    try:
        yield requests
    finally:
        for call in calls:
            call.cancel()
        server.idle()


def test_hits_are_served_and_questions_refused(narrow: Server) -> None:
    known = greedy("known before")
    text, _ = generate(narrow, known)
    kept(narrow, known)
    with full(narrow):
        for number in range(20):
            answer, header = generate(narrow, known)
            assert (header, answer.text) == ("hit-response", text.text)
            refusal = refused(narrow.generation.Generate, greedy(f"unknown {number}"))
            assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert refusal.reason == "QUEUE_FULL"
            assert 100 <= refusal.retry_ms <= 60_000
            if number % 5 == 0:
                assert refused(narrow.generation.GenerateStream, as_stream(greedy("s"))).reason == "QUEUE_FULL"
        assert value(page_of(narrow), "requests_refused_total", reason="QUEUE_FULL") >= 24


def test_readers_along_are_served(narrow: Server) -> None:
    with full(narrow) as busy:
        before = narrow.load().generated_tokens
        streams = [narrow.generation.GenerateStream(as_stream(busy[0]), timeout=60) for _ in range(60)]
        for stream in streams:
            assert dict(stream.initial_metadata())["x-cache"] == "miss"
            assert next(stream).text
            stream.cancel()
        load = narrow.load()
        assert load.running + load.waiting == 3
        assert load.generated_tokens >= before


def test_who_is_refused_was_sent_nothing_and_its_client_tries_again(narrow: Server) -> None:
    policy = {
        "name": [{}],
        "retryPolicy": {
            "maxAttempts": 5, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2,
            "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
        },
    }  # fmt: skip
    options = [("grpc.service_config", json.dumps({"methodConfig": [policy]}))]
    with grpc.insecure_channel(narrow.data, options) as channel, contextlib.ExitStack() as stack:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        stack.enter_context(full(narrow))
        call = narrow.generation.GenerateStream(as_stream(greedy("no headers")), timeout=60)
        assert dict(call.initial_metadata()) == {}
        assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        waiting = [stub.Generate.future(greedy("tried again"), timeout=60)]
        waiting += [stub.Generate.future(greedy("again", output=pb.OutputOptions(logprobs=1)), timeout=60)]
        time.sleep(0.05)
        stack.close()
        for future in waiting:
            assert len(future.result().text) == 8


def test_whatever_needs_a_place_is_refused(narrow: Server) -> None:
    """Asked in vain by one that nobody may read along with; by one that only writes; by one that is sampled."""
    alone = greedy("alone")
    alone.time_budget.seconds = 5
    writing = greedy("writing", cache=pb.CacheOptions(response=pb.CACHE_MODE_WRITE))
    sampled = greedy("sampled", sampling=pb.SamplingOptions(temperature=0.7))
    with full(narrow):
        for request in (alone, writing, sampled):
            refusal = refused(narrow.generation.Generate, request)
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            assert refusal.retry_ms >= 100
    for request in (alone, writing, sampled):
        assert generate(narrow, request)[0].text


def test_abort_names_a_reader_along_and_nobody_else(narrow: Server) -> None:
    with full(narrow) as busy:
        request = as_stream(busy[0])
        request.request_id = "reads along"
        stream = narrow.generation.GenerateStream(request, timeout=60)
        next(stream)
        narrow.admin.AbortGeneration(admin_pb2.AbortGenerationRequest(request_id="reads along"), timeout=60)
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert Refusal.of(caught.value).reason == "REQUEST_ABORTED"
        load = narrow.load()
        assert load.running + load.waiting == 3


def test_who_storms_a_full_queue_is_refused_without_a_look(narrow: Server) -> None:
    """And once the storm is over, what is known is served again."""
    known = greedy("known before the storm")
    generate(narrow, known)
    kept(narrow, known)
    with full(narrow):
        calls = [narrow.generation.Generate.future(greedy(f"unknown in the storm {n}"), timeout=60) for n in range(150)]
        assert {call.code() for call in calls} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for _ in range(20):  # on a slow machine the calls may come so far apart that they are no storm
            looked = value(page_of(narrow), "cache_requests_total", cache="response", outcome="miss")
            calls = [narrow.generation.Generate.future(greedy(f"unknown still {n}"), timeout=60) for n in range(150)]
            assert {call.code() for call in calls} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            refusals = [Refusal.of(cast(grpc.RpcError, call.exception())) for call in calls]
            assert all(one.reason == "QUEUE_FULL" and one.retry_ms >= 100 for one in refusals), "read or not"
            looked_since = value(page_of(narrow), "cache_requests_total", cache="response", outcome="miss") - looked
            if looked_since < 150:
                break
        assert looked_since < 150

        def served() -> bool:
            time.sleep(0.6)  # a storm lasts for as long as somebody asks
            with contextlib.suppress(grpc.RpcError):
                return said(narrow, known) == "hit-response"
            return False

        wait_for(served)


def test_a_hundred_alike_are_one_generation_and_a_hundred_others_are_refused(narrow: Server) -> None:
    narrow.idle()
    before = narrow.load().generated_tokens
    calls = [narrow.generation.Generate.future(greedy("all alike", 40), timeout=60) for _ in range(100)]
    assert len({call.result().text for call in calls}) == 1
    assert narrow.idle().generated_tokens == before + 40
    calls = [narrow.generation.Generate.future(greedy(f"each its own {n}", 100), timeout=60) for n in range(100)]
    most = 0
    while not all(call.done() for call in calls):
        load = narrow.load()
        most = max(most, load.running + load.waiting)
    codes = [call.code() for call in calls]
    assert codes.count(grpc.StatusCode.OK) >= 3
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert 0 < most <= 3


def test_a_storm_leaves_every_place_free(narrow: Server) -> None:
    """Alike and apart, cached and not, read to the end or dropped at any moment."""
    random = Random(11)
    off = pb.CacheOptions(response=pb.CACHE_MODE_OFF)
    calls = []
    for number in range(300):
        text = random.choice(["alike", "alike too", f"apart {number}"])
        request = greedy(text, random.choice([1, 30, 300]), cache=random.choice([None, None, off]))
        if random.random() < 0.3:
            request.stopping.stop_strings.append(random.choice("aeiou"))
        timeout = random.choice([0.05, 0.3, 30])
        calls.append(narrow.generation.GenerateStream(as_stream(request), timeout=timeout))
        if random.random() < 0.3:
            random.choice(calls).cancel()
        if random.random() < 0.1:
            time.sleep(random.random() / 50)
    codes = set()
    for call in calls:
        if random.random() < 0.5:
            call.cancel()
        with contextlib.suppress(grpc.RpcError):
            list(call)
        codes.add(call.code())
    states = grpc.StatusCode
    allowed = {states.OK, states.CANCELLED, states.DEADLINE_EXCEEDED, states.RESOURCE_EXHAUSTED}
    assert {states.OK, states.RESOURCE_EXHAUSTED} <= codes <= allowed
    narrow.idle()
    end = time.monotonic() + PATIENCE
    while True:
        page = page_of(narrow)
        left = [value(page, name) for name in ("requests_live", "requests_looking")]
        left += [value(page, "generations", state=state) for state in ("running", "waiting")]
        if not any(left):
            break
        assert time.monotonic() < end, left
        time.sleep(0.05)
    # All three can be had again, and not one more.
    with full(narrow):
        assert refused(narrow.generation.Generate, greedy("one more")).reason == "QUEUE_FULL"


def test_a_prompt_too_long_to_wait_is_refused_before_any_header(serve: Serve) -> None:
    """Whether anybody generates it already shows only when it is looked for; who reads along needs no room to wait."""
    with serve(*FLAGS, "--limits.queued-prompt-tokens=100") as server, full(server):
        call = server.generation.GenerateStream(as_stream(greedy("x" * 90, LONG)), timeout=60)
        assert dict(call.initial_metadata()) == {}
        assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert Refusal.of(call).reason == "QUEUED_TOKENS"


def test_live_requests_are_bounded_too(serve: Serve) -> None:
    with serve(*FLAGS, "--limits.queued-requests=1", "--limits.live-requests=6") as small:
        request = as_stream(greedy("one for all", LONG))
        streams = [small.generation.GenerateStream(request, timeout=60) for _ in range(6)]
        for stream in streams:
            next(stream)
        refusal = refused(small.generation.GenerateStream, request)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIVE_REQUESTS")
        assert refusal.retry_ms >= 100
        for stream in streams:
            stream.cancel()
        small.idle()


def test_who_reads_along_with_another_server_needs_no_place(
    serve: Serve, redis_server: RedisServer, key_file: Path
) -> None:
    shared = (f"--cache.redis-url={redis_server.url}", f"--cache.key-file={key_file}", "--cache.redis-budget=1")
    with serve(*FLAGS, *shared) as free, serve(*FLAGS, "--limits.queued-requests=0", *shared) as small:
        with full(small, 2):
            request = as_stream(greedy("elsewhere", LONG))
            leader = free.generation.GenerateStream(request, timeout=60)
            next(leader)
            assert refused(small.generation.Generate, greedy("nowhere")).reason == "QUEUE_FULL"
            follower = small.generation.GenerateStream(request, timeout=60)
            assert next(follower).text
            for stream in (leader, follower):
                stream.cancel()
        free.idle()


@pytest.mark.usefixtures("exported_embedder")
def test_no_audit_while_others_want_the_engine(serve: Serve) -> None:
    flags = ("--cache.semantic.mode=on", "--cache.semantic.audit=1", "--limits.queued-requests=1")
    with serve(*FLAGS, *flags) as server:
        loaded(server)
        learnt(server, chat(QUESTION))
        told(server, "semantic_audits_total", 1, outcome="done")
        with full(server):
            before = value(page_of(server), "semantic_audits_total", outcome="done")
            assert said(server, probe(ALIKE)) == "hit-semantic"
            told(server, "semantic_audits_total", 1, outcome="skipped")
            assert value(page_of(server), "semantic_audits_total", outcome="done") == before
