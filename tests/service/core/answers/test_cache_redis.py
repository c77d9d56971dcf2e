"""Fronts that share a Redis: one generation for all, each tenant for itself, and no request that a sick Redis harms."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.redis_server import RedisServer, write_keys
from cache.api import (
    Allowance,
    AnswerEnding,
    AnswerPart,
    CachedCompletion,
    CacheOptions,
    Mode,
    Question,
    SemanticOptions,
)
from engine.api import ModelInfo
from service.core.answers.caches import AnswerCaches
from service.pb.whippet.v1 import admin_pb2
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.asked import as_stream, greedy
from tests.service.conftest import Server
from tests.service.scripted import INFO, ScriptedEngine
from tests.service.tenants import metadata, write_tokens
from tests.waiting import wait_for

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
ON = ("--optimizations.response-cache=true", "--fake.step-time=0.002")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def pair(serve: Serve, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Two fronts, one Redis, two tenants."""
    folder = tmp_path_factory.mktemp("secrets")
    flags = [*ON, f"--cache.redis-url={redis.url}", f"--cache.key-file={write_keys(folder / 'keys')}"]
    flags += ["--cache.redis-budget=1", f"--auth.tokens-file={write_tokens(folder)}"]  # it is about what, not when
    with serve(*flags) as one, serve(*flags) as other:
        yield one, other
        assert one.stop() == other.stop() == 0


def say(server: Server, request: pb.GenerateRequest, tenant: str = "acme") -> tuple[pb.GenerateResponse, str]:
    response, call = server.generation.Generate.with_call(request, timeout=60, metadata=metadata(tenant))
    return response, str(dict(call.initial_metadata())["x-cache"])


def hits(server: Server, request: pb.GenerateRequest, tenant: str = "acme") -> bool:
    return say(server, read_only(request), tenant)[1] == "hit-response"


def tokens(server: Server) -> int:
    return int(server.admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=60, metadata=metadata("acme")).generated_tokens)


def impatient(server: Server) -> int:
    """How often it generated for itself, or in another's place."""
    counts = server.admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=60, metadata=metadata("acme")).cache_counts
    return sum(counts.get(f"flight_shared.{how}", 0) for how in ("alone", "leader_lost"))


def read_only(request: pb.GenerateRequest) -> pb.GenerateRequest:
    reading = pb.GenerateRequest.FromString(request.SerializeToString())
    reading.cache.response = pb.CACHE_MODE_READ
    return reading


def test_two_fronts_and_still_one_generation(pair: tuple[Server, Server]) -> None:
    before = sum(tokens(server) for server in pair)
    request = greedy("two fronts", 100)
    futures = [
        server.generation.Generate.future(request, timeout=60, metadata=metadata("acme"))
        for _ in range(25)
        for server in pair
    ]
    streams = [
        server.generation.GenerateStream(as_stream(request), timeout=60, metadata=metadata("acme"))
        for _ in range(25)
        for server in pair
    ]
    texts = {"".join(m.text for m in stream) for stream in streams} | {future.result().text for future in futures}
    assert len(texts) == 1
    wait_for(lambda: sum(tokens(server) for server in pair) >= before + 100)
    time.sleep(0.3)
    # Once more for each front that did not wait for a Redis, or another front, that was late on a busy machine.
    most = 1 + sum(impatient(server) for server in pair)
    assert sum(tokens(server) for server in pair) in {before + 100 * times for times in range(1, most + 1)}


def test_same_tenant_hits_and_other_misses_on_both_fronts(pair: tuple[Server, Server]) -> None:
    request = greedy("mine alone", 8)
    text = say(pair[0], request)[0].text
    for server in pair:
        wait_for(partial(hits, server, request))
        assert say(server, read_only(request))[0].text == text
        assert say(server, read_only(request), "bravo")[1] == "miss"


def test_a_flush_is_in_force_on_every_front_at_once(pair: tuple[Server, Server]) -> None:
    mine, theirs = greedy("flushed everywhere", 8), greedy("kept by the other", 8)
    for request, tenant in ((mine, "acme"), (theirs, "bravo")):
        say(pair[0], request, tenant)
        for server in pair:
            wait_for(partial(hits, server, request, tenant))
    flush = admin_pb2.FlushCacheRequest(tenant="acme")
    assert pair[1].admin.FlushCache(flush, timeout=60, metadata=metadata("acme")).entries >= 1
    for server in pair:
        assert say(server, read_only(mine))[1] == "miss"
        assert say(server, read_only(theirs), "bravo")[1] == "hit-response"
    everybody = pair[0].admin.FlushCache(admin_pb2.FlushCacheRequest(), timeout=60, metadata=metadata("acme"))
    assert everybody.entries >= 1
    for server in pair:
        assert say(server, read_only(theirs), "bravo")[1] == "miss"


def test_nothing_readable_lies_in_redis(pair: tuple[Server, Server], redis: RedisServer) -> None:
    request = greedy("a secret question", 8)
    text = say(pair[0], request)[0].text
    wait_for(partial(hits, pair[1], request))
    keys = redis.command("KEYS", "*")
    assert b"r:" in keys
    assert b"secret" not in keys
    for name in keys.split(b"\r\n"):
        if name.startswith(b"r:"):
            assert text.encode() not in redis.command("GET", name)


CHANGES: dict[str, dict[str, Any]] = {
    "weights": {"weights_digest": "other"},
    "format": {"weight_format": "awq"},
    "dtype": {"dtype": "float16"},
    "keys and values": {"kv_dtype": "float8_e4m3fn"},
    "architecture": {"architecture": "y"},
    "tokenizer or template": {},
}


@pytest.mark.product
@pytest.mark.parametrize("name", CHANGES)
async def test_another_model_never_sees_the_answers_of_this_one(redis: RedisServer, tmp_path: Path, name: str) -> None:
    options = CacheOptions(
        redis_url=redis.url,
        key_file=write_keys(tmp_path / "keys"),
        redis_budget=1.0,
        semantic=SemanticOptions(mode=Mode.OFF),
    )

    async def found(info: ModelInfo, tokenizer: str, put: bool) -> bool:
        engine = ScriptedEngine([])
        engine.info = info
        answers = AnswerCaches(options, engine, tokenizer)
        caches = answers.now()
        assert caches is not None
        try:
            if put:
                for _ in range(2000):  # written in the background, or dropped where the store was too slow
                    await caches.responses.put(question(), answer())
                    if await caches.responses.get(question(), Allowance(1.0)) is not None:
                        break
                    await asyncio.sleep(0.01)
            return await caches.responses.get(question(), Allowance(1.0)) is not None
        finally:
            await answers.aclose()

    async with asyncio.timeout(60):
        assert await found(INFO, "tokenizer", put=True)
        assert await found(INFO, "tokenizer", put=False)
        assert await found(replace(INFO, kv_dtype="bfloat16"), "tokenizer", put=False), (
            "on another CPU, the same answers"
        )
        other = ModelInfo(**{**{f: getattr(INFO, f) for f in INFO.__dataclass_fields__}, **CHANGES[name]})
        assert not await found(other, "tokenizer" if CHANGES[name] else "other", put=False)


def question() -> Question:

    return Question(tenant="t", token_ids=(1, 2), parameters=(), max_tokens=5, deterministic=True)


def answer() -> CachedCompletion:

    ending = AnswerEnding(reason="stop", prompt_tokens=2, completion_tokens=1)
    return CachedCompletion(
        parts=(AnswerPart((7,), "a", ending),), max_tokens=5, provenance="test", created_at=time.time()
    )


async def test_answers_are_dropped_when_too_much_runs_beside() -> None:
    engine = ScriptedEngine([])
    answers = AnswerCaches(CacheOptions(semantic=SemanticOptions(mode=Mode.OFF)), engine, "")
    hold = asyncio.Event()

    async def work() -> None:
        await hold.wait()

    for _ in range(300):
        answers.beside(work, "store")
    assert answers.named_counts() == {"cache_dropped.store": 44}
    hold.set()
    await answers.aclose()


async def test_what_fails_beside_is_counted_and_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    answers = AnswerCaches(CacheOptions(semantic=SemanticOptions(mode=Mode.OFF)), ScriptedEngine([]), "")

    async def work() -> None:
        raise ValueError("the prompt")

    answers.beside(work, "store")
    await asyncio.sleep(0.01)
    assert answers.named_counts() == {"cache_beside.failed": 1}
    assert "the prompt" not in caplog.text
    await answers.aclose()
