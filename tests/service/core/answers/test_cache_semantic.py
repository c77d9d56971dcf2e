"""The semantic cache through a real channel: what it serves, to whom, and when it keeps its hands off."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from bench.redis_server import RedisServer
from cache.api import CacheOptions, Mode, SemanticOptions
from service.config.settings import BadSettings
from service.core.answers import caches as caching
from service.core.answers.caches import checked
from service.pb.whippet.v1 import admin_pb2
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.asked import ALIKE, QUESTION, as_stream, chat, generate, learnt, loaded, probe, said
from tests.service.conftest import PATIENCE, Server, ask, refused
from tests.service.tenants import TENANTS, metadata, write_tokens
from tests.waiting import wait_for

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
# Made beforehand: a server would otherwise be without a semantic cache for seconds.
pytestmark = [pytest.mark.product, pytest.mark.usefixtures("exported_embedder")]
ON = ("--optimizations.response-cache=true", "--cache.semantic.mode=on", "--cache.semantic.audit=0")


@pytest.fixture(scope="module")
def on(serve: Serve) -> Iterator[Server]:
    with serve(*ON) as one:
        loaded(one)
        yield one
        assert one.stop() == 0, one.log.read_text()


def test_a_question_of_the_same_words_is_served(on: Server) -> None:
    answer = learnt(on, chat(QUESTION))
    found, header = generate(on, probe(ALIKE))
    assert (header, found.text) == ("hit-semantic", answer.text)
    finish = found.finish
    assert (finish.cache_source, finish.reason) == (pb.CACHE_SOURCE_SEMANTIC, pb.FINISH_REASON_STOP)
    assert 0.8 < finish.cache_hit.similarity <= 1.001
    assert finish.cache_hit.entry_id
    assert finish.usage.cached_tokens == finish.usage.prompt_tokens
    assert finish.usage.completion_tokens == answer.finish.usage.completion_tokens
    streamed = list(on.generation.GenerateStream(as_stream(probe(ALIKE)), timeout=60))
    assert "".join(message.text for message in streamed) == answer.text
    assert streamed[-1].finish.cache_source == pb.CACHE_SOURCE_SEMANTIC
    assert len(streamed) > 1


@pytest.mark.parametrize(
    "request_",
    [
        probe("How do I reset my password with 2 keys?"),
        probe("How do I not reset my password?"),
        probe("Why do I reset my password?"),
        probe(ALIKE, system="Answer like a pirate."),
        probe(ALIKE, sampling=pb.SamplingOptions(top_k=3)),
        probe(ALIKE, sampling=pb.SamplingOptions(temperature=0.8, seed=1)),
        probe("Bake a cake."),
    ],
    ids=["number", "negation", "question word", "system prompt", "parameter", "sampled", "another"],
)
def test_what_must_not_be_served(on: Server, request_: pb.GenerateRequest) -> None:
    learnt(on, chat(QUESTION))
    assert said(on, request_) == "miss"


def test_history_must_be_equal(on: Server) -> None:
    def talk(before: str, last: str) -> pb.GenerateRequest:
        request = chat(last)
        del request.chat.messages[:]
        for role, content in (("user", before), ("assistant", "Yes."), ("user", last)):
            request.chat.messages.add(role=role, content=content)
        return request

    learnt(on, talk("Is it about Gmail?", "How long does that take?"))
    alike, other = talk("Is it about Gmail?", "how long does that take"), talk("Is it slow?", "how long does that take")
    for request, header in ((alike, "hit-semantic"), (other, "miss")):
        request.cache.response = request.cache.semantic = pb.CACHE_MODE_READ
        assert said(on, request) == header


def test_callers_tighten_the_threshold_and_never_loosen_it(on: Server) -> None:
    learnt(on, chat("What is the tallest mountain in France?"))
    alike = "what is the tallest mountain in france"
    far = "Name a mountain."
    for text, threshold, header in ((alike, 0.5, "hit-semantic"), (far, 0.0, "miss")):
        request = probe(text)
        request.cache.semantic_threshold = threshold
        assert said(on, request) == header
    request = probe("what is   the TALLEST mountain, in France??")
    alikeness = generate(on, request)[0].finish.cache_hit.similarity
    if 0 < alikeness < 0.999:
        request.cache.semantic_threshold = 1.0
        assert said(on, request) == "miss"
    request.cache.semantic_threshold = 1.5
    assert refused(on.generation.Generate, request).fields == {"cache.semantic_threshold"}


def test_plain_text_only_where_it_is_wished(on: Server) -> None:
    def plain(text: str, mode: Any) -> pb.GenerateRequest:
        request = chat(text)
        request.text = text
        request.cache.semantic = mode
        if mode == pb.CACHE_MODE_READ:  # what comes too early must not be found by its own words later on
            request.cache.response = mode
        return request

    assert said(on, plain("Who built the Louvre, and when?", pb.CACHE_MODE_READ_WRITE)) == "miss"
    wait_for(lambda: said(on, plain("who built the Louvre, and when?", pb.CACHE_MODE_READ)) == "hit-semantic")
    assert said(on, plain("who built the Louvre, and when", pb.CACHE_MODE_READ)) == "miss"  # continues differently
    assert said(on, plain("who built the Louvre, and when?", pb.CACHE_MODE_UNSPECIFIED)) == "miss"


def test_modes_and_the_switch(on: Server) -> None:
    learnt(on, chat("Where is the nearest pharmacy in town?"))
    request = probe("where is the nearest pharmacy in town")
    assert said(on, request) == "hit-semantic"
    request.cache.semantic = pb.CACHE_MODE_OFF
    assert said(on, request) == "miss"
    request.cache.semantic = pb.CACHE_MODE_READ
    for enabled, header in ((False, "miss"), (True, "hit-semantic")):
        on.admin.SetOptimization(admin_pb2.SetOptimizationRequest(name="semantic_cache", enabled=enabled), timeout=60)
        assert said(on, request) == header


def test_who_only_reads_answers_may_still_teach_alikeness(on: Server) -> None:
    request = chat("What do whales do all day long?")
    request.cache.response, request.cache.semantic = pb.CACHE_MODE_READ, pb.CACHE_MODE_READ_WRITE
    learnt(on, request)
    request.cache.semantic = pb.CACHE_MODE_OFF
    assert said(on, request) == "miss"


def test_flush_of_one_entry(on: Server) -> None:
    learnt(on, chat("Which museums are open on Mondays here?"))
    request = probe("which museums are open on mondays here")
    entry = generate(on, request)[0].finish.cache_hit.entry_id
    flush = admin_pb2.FlushCacheRequest(entry_id=entry, kind=admin_pb2.CACHE_KIND_SEMANTIC)
    assert on.admin.FlushCache(flush, timeout=60).entries == 1
    assert said(on, request) == "miss"


def test_tenants_never_meet(serve: Serve, redis_server: RedisServer, key_file: Path, tmp_path: Path) -> None:
    flags = (f"--cache.redis-url={redis_server.url}", f"--cache.key-file={key_file}", "--cache.redis-budget=1")

    def say(server: Server, request: pb.GenerateRequest, tenant: str) -> str:
        _, call = server.generation.Generate.with_call(request, timeout=60, metadata=metadata(tenant))
        return str(dict(call.initial_metadata())["x-cache"])

    def taught(server: Server) -> bool:
        """What is asked before the embedder is loaded teaches nothing."""
        say(one, chat(QUESTION, cache=pb.CacheOptions(response=pb.CACHE_MODE_OFF)), mine)
        return say(server, probe(ALIKE), mine) == "hit-semantic"

    mine, theirs = TENANTS
    tokens = f"--auth.tokens-file={write_tokens(tmp_path)}"
    with serve(*ON, *flags, tokens) as one, serve(*ON, *flags, tokens) as other:
        for server in (one, other):
            wait_for(partial(taught, server))
            assert say(server, probe(ALIKE), theirs) == "miss"
            assert say(server, probe(QUESTION), theirs) == "miss"


def test_shadow_decides_and_never_serves(serve: Serve) -> None:
    with serve("--optimizations.response-cache=true", "--cache.semantic.mode=shadow") as server:
        loaded(server)
        end = time.monotonic() + PATIENCE
        # The second is asked when the first is there to be found; the fake engine answers each in its own way.
        for text, seen in ((QUESTION, "semantic_lookup.strict"), (ALIKE, "semantic_observed.wrong")):
            while not server.load().cache_counts.get(seen, 0):
                assert said(server, chat(text, cache=pb.CacheOptions(response=pb.CACHE_MODE_WRITE))) == "miss"
                assert time.monotonic() < end
                time.sleep(0.05)


def test_an_audit_takes_back_what_was_wrong(serve: Serve) -> None:
    with serve(*ON[:2], "--cache.semantic.audit=1") as server:
        loaded(server)
        generate(server, chat(QUESTION))
        end = time.monotonic() + PATIENCE
        while said(server, probe(ALIKE)) != "hit-semantic":
            assert time.monotonic() < end
            time.sleep(0.02)
        while not server.load().cache_counts.get("semantic_observed.wrong", 0):
            assert time.monotonic() < end
            time.sleep(0.02)
        assert said(server, probe(ALIKE)) == "miss"


def test_without_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "missing_for_semantic", lambda model: ("onnxruntime", "usearch"))
    assert checked(CacheOptions()).semantic.mode == "off"
    with pytest.raises(BadSettings, match=r"onnxruntime, usearch.*pip install -e"):
        checked(CacheOptions(semantic=SemanticOptions(mode=Mode.ON)))
    assert checked(CacheOptions(semantic=SemanticOptions(mode=Mode.OFF))).semantic.mode == "off"


def test_a_server_without_it_refuses_who_asks_for_it(server: Server) -> None:
    request = ask("x", 1, cache=pb.CacheOptions(semantic=pb.CACHE_MODE_READ_WRITE))
    assert refused(server.generation.Generate, request).code is grpc.StatusCode.UNIMPLEMENTED


def test_what_is_damaged_in_redis_costs_a_hit_and_no_answer(
    serve: Serve, redis_server: RedisServer, key_file: Path
) -> None:
    """A directory member that is no digest, evidence with a field that is no number, and every other key as a list."""
    flags = (f"--cache.redis-url={redis_server.url}", f"--cache.key-file={key_file}", "--cache.redis-budget=1")

    with serve(*ON, *flags, "--cache.semantic.threshold=0.5") as one:
        loaded(one)
        learnt(one, chat(QUESTION))
        wait_for(lambda: said(one, probe(ALIKE)) == "hit-semantic")
        (directory,) = redis_server.keys("d:*")
        redis_server.command("ZADD", directory, "1", b"\xff\xfe", "2", "what", "inf", "0" * 96)
        assert said(one, probe(ALIKE)) == "hit-semantic"
        generate(one, chat("How do I reset my old password?"))
        for name in redis_server.keys("v:*"):
            redis_server.command("DEL", name)
            redis_server.command("HSET", name, "47:right", "many")
        for name in redis_server.keys("*"):
            assert generate(one, chat(QUESTION))[0].text
            assert generate(one, probe(ALIKE))[0].text
            redis_server.command("DEL", name)
            redis_server.command("RPUSH", name, "what")
        for _ in range(5):
            assert generate(one, chat(QUESTION))[0].text
            assert generate(one, probe(ALIKE))[0].text
        wait_for(lambda: said(one, probe(ALIKE)) == "hit-semantic")
        assert one.stop() == 0
        assert "INTERNAL" not in one.log.read_text()
