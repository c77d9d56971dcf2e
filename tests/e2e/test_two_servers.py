"""Two servers of the demo model behind a real Envoy, with one Redis: what one has computed, the other need not."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from bench.redis_server import RedisServer
from service.pb.whippet.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc
from service.pb.whippet.v1 import generation_pb2 as pb
from tests import envoy
from tests.e2e.conftest import ROOT, Running, Serve

pytestmark = pytest.mark.proof

PATIENCE = 90.0  # seconds
SHARED = 640  # tokens
TRIES = 4  # prefixes: for each alone, computing may look faster than fetching on a busy machine


class Pair:
    """The two behind Envoy, of which one or both are in use."""

    def __init__(self, proxy: envoy.Envoy, servers: tuple[Running, Running], stack: contextlib.ExitStack) -> None:
        self._proxy = proxy
        channels = [stack.enter_context(grpc.insecure_channel(one.admin)) for one in servers]
        self._admins = [admin_pb2_grpc.AdminServiceStub(channel) for channel in channels]
        channel = stack.enter_context(grpc.insecure_channel(proxy.address))
        self._stub = generation_pb2_grpc.GenerationServiceStub(channel)

    def use(self, which: int) -> None:
        """This one alone gets requests."""
        self._admins[1 - which].Drain(admin_pb2.DrainRequest(), timeout=PATIENCE)
        self._proxy.until_healthy(1)

    def use_both(self) -> None:
        for admin in self._admins:
            admin.Undrain(admin_pb2.UndrainRequest(), timeout=PATIENCE)
        self._proxy.until_healthy(2)

    def ask(self, request: pb.GenerateRequest) -> tuple[str, pb.GenerateResponse]:
        """`x-cache` and answer; greedy."""
        request.sampling.temperature = 0
        request.output.token_ids = True
        answer, call = self._stub.Generate.with_call(request, timeout=PATIENCE)
        return str(dict(call.initial_metadata())["x-cache"]), answer

    def compute(self, prefix: list[int], question: int) -> pb.GenerateResponse:
        """An answer to a prompt that begins so, from no response cache."""
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[*prefix, question]))
        request.stopping.max_tokens = 8
        request.cache.response = pb.CACHE_MODE_OFF
        return self.ask(request)[1]


@pytest.fixture
def pair(serve: Serve, redis_server: RedisServer, key_file: Path, tmp_path: Path) -> Iterator[Pair]:
    flags = ("--device=cpu", "--scheduler.threads=1", f"--model={ROOT / 'models' / 'demo-awq'}")
    shared = (f"--cache.redis-url={redis_server.url}", f"--cache.key-file={key_file}", "--cache.redis-budget=1")
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serve(*flags, *shared)) for _ in range(2)]
        backends = [envoy.Backend(port(one.data), port(one.health)) for one in servers]
        proxy = stack.enter_context(envoy.running(tmp_path, backends))
        yield Pair(proxy, (servers[0], servers[1]), stack)


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_one_has_computed_the_other_need_not(pair: Pair, redis_server: RedisServer) -> None:
    draw = random.Random(7)
    prefixes = [[draw.randrange(300, 1000) for _ in range(SHARED)] for _ in range(TRIES)]
    question = pb.GenerateRequest(text="def read_json(path):")
    question.stopping.max_tokens = 24

    pair.use(0)
    header, answer = pair.ask(question)
    assert (header, answer.finish.cache_source) == ("miss", pb.CACHE_SOURCE_NONE)
    until(lambda: bool(redis_server.keys("r:*")))
    for prefix in prefixes:
        before = len(redis_server.keys("k:*"))
        asked = iter(range(300, 1000))
        until(lambda: bool(pair.compute(prefix, next(asked)).text) and len(redis_server.keys("k:*")) > before)  # noqa: B023
    known = [pair.compute(prefix, 7) for prefix in prefixes]
    assert all(one.finish.usage.cached_tokens == SHARED for one in known)

    pair.use_both()
    pair.use(1)
    header, again = pair.ask(question)
    assert (header, again.finish.cache_source) == ("hit-response", pb.CACHE_SOURCE_RESPONSE)
    assert again.text == answer.text
    found = [pair.compute(prefix, 7) for prefix in prefixes]
    assert [list(one.token_ids) for one in found] == [list(one.token_ids) for one in known]
    assert any(one.finish.usage.cached_tokens > 0 for one in found), found
