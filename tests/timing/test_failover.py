"""The master of the caches' Redis dies under callers: none of them hears of it, and soon another one serves."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from bench.redis_server import write_keys
from tests.redis_guarded import NAME, guarded_redis
from tests.service.asked import greedy, said
from tests.service.conftest import Server
from tests.waiting import wait_for

FAILOVER = 10.0  # seconds; sentinels that wait half a second for a silent master need one or two
CALLERS = 3

Serve = Callable[..., contextlib.AbstractContextManager[Server]]


def served_from_redis(server: Server, text: str) -> None:
    """Returns once an answer was stored and found."""
    wait_for(lambda: said(server, greedy(text, 4)) == "hit-response")


def test_a_failover_is_no_error_and_over_in_ten_seconds(serve: Serve, tmp_path: Path) -> None:
    errors: list[grpc.RpcError] = []
    answered, over = [0] * CALLERS, threading.Event()

    def call(server: Server, who: int) -> None:
        while not over.is_set():
            try:
                server.generation.Generate(greedy(f"{who} {answered[who] // 2}", 4), timeout=60)
                answered[who] += 1
            except grpc.RpcError as error:
                errors.append(error)

    with guarded_redis(tmp_path) as redis:
        ours, sentinels = redis.settings(), ",".join(f"127.0.0.1:{one.port}" for one in redis.sentinels)
        files = {"ca": "ca.pem", "cert": "client.pem", "key": "client.key", "password": "password"}
        flags = [f"--cache.redis-{name}-file={tmp_path / file}" for name, file in files.items()]
        flags += [f"--cache.redis-sentinels=watcher@{sentinels}", "--optimizations.response-cache=true"]
        flags += [f"--cache.redis-sentinel-password-file={ours.sentinel_password_file}"]
        flags += [f"--cache.redis-url=rediss://whippet@{NAME}/0", f"--cache.key-file={write_keys(tmp_path / 'keys')}"]
        with serve(*flags) as server:
            served_from_redis(server, "before")
            callers = [threading.Thread(target=call, args=(server, who)) for who in range(CALLERS)]
            for caller in callers:
                caller.start()
            try:
                redis.master().stop()
                begun = time.monotonic()
                served_from_redis(server, "after")
                took = time.monotonic() - begun
            finally:
                over.set()
                for caller in callers:
                    caller.join()
            assert server.stop() == 0, server.log.read_text()
            assert " ERROR " not in server.log.read_text()
    assert not errors
    assert min(answered) > 0
    assert took < FAILOVER
