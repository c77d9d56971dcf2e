"""A Redis that is sick in every way: no request fails or waits because of it, and all is well again afterwards."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from bench.redis_server import Proxy, RedisServer, proxy_in_thread, write_keys
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.asked import greedy
from tests.service.conftest import Server
from tests.waiting import wait_for

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
ON = ("--optimizations.response-cache=true", "--fake.step-time=0.002")


class Sick:
    """A front, its Redis, and what is between."""

    def __init__(self, server: Server, redis: RedisServer, proxy: Proxy) -> None:
        self.server, self.redis, self.proxy = server, redis, proxy
        self.asked = 0

    def run(self, count: int) -> list[float]:
        """So many requests, half of them asked before; seconds that each waited for its caches."""
        waited = []
        for _ in range(count):
            self.asked += 1
            request = greedy(f"sick {self.asked // 2}", 4)
            plain = greedy(f"sick {self.asked // 2}", 4, cache=pb.CacheOptions(response=pb.CACHE_MODE_OFF))
            response = self.server.generation.Generate(request, timeout=60)
            assert response.text == self.server.generation.Generate(plain, timeout=60).text
            waited.append(response.finish.timings.cache_lookup.ToNanoseconds() / 1e9)
        return waited

    def counts(self) -> dict[str, int]:
        return dict(self.server.load().cache_counts)

    def well(self) -> None:
        """Starts Redis if it does not run, and waits until what is written can be read again and every breaker of
        requests is closed."""
        if self.redis.process is None:
            self.redis.start()
        self.asked += 2
        request = greedy(f"sick {self.asked // 2} well", 4)

        def hit() -> bool:
            self.asked += 2
            fresh = greedy(f"sick {self.asked // 2} fresh", 4)
            self.server.generation.Generate(fresh, timeout=60)  # a breaker closes when somebody asks
            _, call = self.server.generation.Generate.with_call(request, timeout=60)
            states = self.server.load().cache_breakers
            closed = states["small_reads"] == states["small_writes"] == "closed"
            time.sleep(0.05)
            return closed and dict(call.initial_metadata())["x-cache"] == "hit-response"

        wait_for(hit)


@pytest.fixture(scope="module")
def sick(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sick]:
    with served(serve, tmp_path_factory) as one:
        yield one


@contextlib.contextmanager
def served(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sick]:
    """Redis does not run yet when the server starts."""
    folder = tmp_path_factory.mktemp("sick")
    redis = RedisServer(folder)
    flags = (*ON, f"--cache.key-file={write_keys(folder / 'keys')}")
    try:
        with proxy_in_thread(redis.port) as between, serve(*flags, f"--cache.redis-url={between.url}") as server:
            yield Sick(server, redis, between)
            redis.stop()
            assert server.stop() == 0, server.log.read_text()
    finally:
        redis.stop()


def test_a_redis_that_starts_late(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> None:
    with served(serve, tmp_path_factory) as sick:
        sick.run(12)
        assert "open" in sick.server.load().cache_breakers.values()
        sick.well()


@contextlib.contextmanager
def refused(sick: Sick) -> Iterator[None]:
    sick.redis.stop()
    yield
    sick.redis.start()


@contextlib.contextmanager
def stalled(sick: Sick) -> Iterator[None]:
    sick.redis.pause()
    yield
    sick.redis.resume()


@contextlib.contextmanager
def slow(sick: Sick) -> Iterator[None]:
    sick.proxy.delay = 0.1
    yield
    sick.proxy.delay = 0.0


@contextlib.contextmanager
def cut(sick: Sick) -> Iterator[None]:
    sick.proxy.cut_after = 9
    yield
    sick.proxy.cut_after = None


@contextlib.contextmanager
def full(sick: Sick) -> Iterator[None]:
    sick.redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    sick.redis.command("CONFIG", "SET", "maxmemory", "1")
    yield
    sick.redis.command("CONFIG", "SET", "maxmemory", "0")


@contextlib.contextmanager
def readonly(sick: Sick) -> Iterator[None]:
    sick.redis.command("REPLICAOF", "127.0.0.1", "1")
    sick.redis.command("CONFIG", "SET", "replica-serve-stale-data", "yes")
    yield
    sick.redis.command("REPLICAOF", "NO", "ONE")


FAULTS = {"refused": refused, "stalled": stalled, "slow": slow, "cut": cut, "full": full, "readonly": readonly}


@pytest.mark.parametrize("name", FAULTS)
def test_no_request_fails_because_redis_does(sick: Sick, name: str) -> None:
    sick.well()
    before = sick.counts()
    with FAULTS[name](sick):
        sick.run(20)
        counts = sick.counts()
    if name in ("refused", "stalled", "slow", "cut"):
        assert counts.get("cache_fault.breaker", 0) > before.get("cache_fault.breaker", 0)
    sick.well()


def test_an_emptied_redis_is_a_miss(sick: Sick) -> None:
    sick.well()
    for _ in range(10):
        sick.redis.command("FLUSHALL")
        sick.run(2)
    sick.well()
