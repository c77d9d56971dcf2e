"""Shared prefixes through the whole server: who shares with whom, and what a caller is told of it."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from bench.redis_server import RedisServer
from cache.seal.partition import RECENT
from service.pb.whippet.v1 import admin_pb2
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.conftest import PATIENCE, Server, ask
from tests.waiting import wait_for

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
IDS = [1 + at * at % 251 for at in range(1100)]
OFF = {"response": pb.CACHE_MODE_OFF}
FULL = 1088  # the last token is always computed, and sixty-eight pages lie before it


def tokens_of(server: Server, ids: list[int], token: str = "a", **cache: int) -> tuple[int, list[int]]:
    """cached tokens and answer."""
    request = ask(token_ids=pb.TokenIds(ids=ids), tokens=4, output=pb.OutputOptions(token_ids=True))
    request.sampling.temperature = 0
    request.cache.CopyFrom(pb.CacheOptions(**cache))  # type: ignore[arg-type]
    answer = server.generation.Generate(request, timeout=60, metadata=(("authorization", f"Bearer {token}"),))
    assert answer.finish.usage.prompt_tokens == len(ids)
    return answer.finish.usage.cached_tokens, list(answer.token_ids)


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.yaml"
    rights = {"a": "[generate, admin]", "b": "[generate]"}
    path.write_text(
        "".join(
            f'- {{tenant: tenant-{name}, sha256: "{hashlib.sha256(name.encode()).hexdigest()}", rights: {right}}}\n'
            for name, right in rights.items()
        )
    )
    return path


@pytest.mark.parametrize("response_cache", ["true", "false"])
def test_tenants_share_with_themselves_alone(serve: Serve, tokens_file: Path, response_cache: str) -> None:
    with serve(f"--auth.tokens-file={tokens_file}", f"--optimizations.response-cache={response_cache}") as server:
        off = {} if response_cache == "false" else {"response": pb.CACHE_MODE_OFF}
        cached, answer = tokens_of(server, IDS, **off)
        assert cached == 0
        assert tokens_of(server, IDS, "b", **off) == (0, answer)
        assert tokens_of(server, IDS, **off) == (FULL, answer)
        assert tokens_of(server, IDS, "b", **off) == (FULL, answer)
        assert tokens_of(server, IDS, bypass_prefix=True, **off) == (0, answer)

        admin = (("authorization", "Bearer a"),)
        for enabled, expected in ((False, [0, 0]), (True, [0, FULL])):
            change = admin_pb2.SetOptimizationRequest(name="prefix_cache", enabled=enabled)
            server.admin.SetOptimization(change, timeout=60, metadata=admin)
            assert [tokens_of(server, IDS, **off) for _ in range(2)] == [(count, answer) for count in expected]
        assert tokens_of(server, IDS, "b", **off)[0] == 0
        server.admin.FlushCache(admin_pb2.FlushCacheRequest(tenant="tenant-a"), timeout=60, metadata=admin)
        assert tokens_of(server, IDS, **off) == (0, answer)
        assert tokens_of(server, IDS, "b", **off)[0] == FULL


def test_where_nobody_can_say_whose_they_are_none_are_shared(
    serve: Serve, make_redis: Callable[..., RedisServer], tokens_file: Path, key_file: Path
) -> None:
    """A tenant's partition has its epoch, which stands in Redis."""
    gone = make_redis(started=False)
    flags = (f"--cache.redis-url={gone.url}", f"--cache.key-file={key_file}", f"--auth.tokens-file={tokens_file}")
    with serve(*flags) as server:
        found = [tokens_of(server, IDS, who) for who in "aabb"]
        assert [cached for cached, _ in found] == [0, 0, 0, 0]
        assert len({tuple(answer) for _, answer in found}) == 1


def test_an_engine_that_died_is_replaced_by_one_that_knows_the_prefix(
    serve: Serve, redis_server: RedisServer, tokens_file: Path, key_file: Path
) -> None:
    shared = (
        f"--cache.redis-url={redis_server.url}",
        f"--cache.key-file={key_file}",
        "--cache.prefix.chunk-bytes=4096",
        "--cache.redis-budget=0.5",
    )
    slow = ("--fake.step-time=0.05", "--fake.faults=true", f"--auth.tokens-file={tokens_file}")
    with serve(*shared, *slow) as server:
        _, answer = tokens_of(server, IDS)
        # A write that a busy Redis did not take in time is made again at the next use.
        wait_for(lambda: tokens_of(server, IDS) == (FULL, answer) and written(redis_server))
        with pytest.raises(grpc.RpcError):
            tokens_of(server, [0, 3, 1])  # the fake's word for a crash
        deadline = time.monotonic() + PATIENCE
        while True:
            assert time.monotonic() < deadline, "the engine did not come back"
            with contextlib.suppress(grpc.RpcError):
                tokens_of(server, [5], "b")
                break
            time.sleep(0.05)
        assert tokens_of(server, IDS, "b") == (0, answer)
        assert tokens_of(server, IDS) == (1024, answer)
    with serve(*shared, *slow) as replica:
        assert tokens_of(replica, [*IDS[:1030], 9])[0] == 1024
        assert tokens_of(replica, IDS, "b")[0] == 0


def written(redis_server: RedisServer) -> bool:
    """Whether all is in Redis: that is done beside the answers. Nothing tells when it is over."""
    before = len(redis_server.keys("k:*"))
    time.sleep(1)
    return 0 < before == len(redis_server.keys("k:*"))


def flush(server: Server, kind: admin_pb2.CacheKind, tenant: str = "tenant-a") -> int:
    admin = (("authorization", "Bearer a"),)
    request = admin_pb2.FlushCacheRequest(tenant=tenant, kind=kind)
    return int(server.admin.FlushCache(request, timeout=60, metadata=admin).entries)


def test_flushing_prefixes_alone_leaves_answers(serve: Serve, tokens_file: Path) -> None:
    with serve(f"--auth.tokens-file={tokens_file}", "--optimizations.response-cache=true") as server:
        _, answer = tokens_of(server, IDS)
        read = {"response": pb.CACHE_MODE_READ}
        wait_for(lambda: tokens_of(server, IDS, **read) == (len(IDS), answer))
        assert tokens_of(server, IDS, "b", **OFF)[0] == 0
        assert flush(server, admin_pb2.CACHE_KIND_PREFIX) == 0
        assert tokens_of(server, IDS, **read) == (len(IDS), answer)
        assert tokens_of(server, IDS, **OFF) == (0, answer)
        assert tokens_of(server, IDS, **OFF) == (FULL, answer)
        assert tokens_of(server, IDS, "b", **OFF) == (FULL, answer)
        assert flush(server, admin_pb2.CACHE_KIND_RESPONSE) == 1
        assert tokens_of(server, IDS, **OFF) == (FULL, answer)
        flush(server, admin_pb2.CACHE_KIND_PREFIX, "")  # everybody's
        assert [tokens_of(server, IDS, name, **OFF)[0] for name in "ab"] == [0, 0]


@pytest.mark.proof
@pytest.mark.parametrize("kind", [admin_pb2.CACHE_KIND_PREFIX, admin_pb2.CACHE_KIND_UNSPECIFIED])
def test_a_flush_reaches_other_servers_and_what_lies_in_redis(
    serve: Serve, redis_server: RedisServer, tokens_file: Path, key_file: Path, kind: admin_pb2.CacheKind
) -> None:
    shared = (
        f"--cache.redis-url={redis_server.url}",
        f"--cache.key-file={key_file}",
        f"--auth.tokens-file={tokens_file}",
    )
    slow = ("--cache.prefix.chunk-bytes=4096", "--fake.step-time=0.05", "--cache.redis-budget=1")
    with serve(*shared, *slow) as one, serve(*shared, *slow) as other:
        for name in "ab":
            for _ in range(2):
                _, answer = tokens_of(one, IDS, name)
        # Out of Redis, and then out of its own pages. A write that Redis did not take is made again at the next use.
        wait_for(lambda: tokens_of(one, IDS, "a")[0] == FULL and tokens_of(other, IDS, "a")[0] >= 1024)
        assert tokens_of(other, IDS, "a") == (FULL, answer)
        flush(one, kind)
        assert tokens_of(one, IDS, "a") == (0, answer)
        time.sleep(RECENT)
        assert tokens_of(other, IDS, "a") == (0, answer)
        assert tokens_of(one, IDS, "b")[0] >= 1024
