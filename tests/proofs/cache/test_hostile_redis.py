"""Streams and health beside who answers in Redis's place with replies without an end."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.cache.hostile import ENDLESS, Reply, answering
from tests.service.asked import as_stream, greedy
from tests.service.conftest import Server, serve, template

__all__ = ["serve", "template"]
Serve = Callable[..., contextlib.AbstractContextManager[Server]]
GAP = 0.5  # seconds between two messages of a stream, or of a health check, on two cores
ON = ("--optimizations.response-cache=true", "--fake.step-time=0.01")
ASKED = 6  # requests that look something up
WATCHED = 20  # gaps, at least: a quick machine answers the requests before it has seen as many
PLAIN = 0.05  # seconds, of a probe's pause
HELD = 200 * 2**20  # bytes by which a front may grow


@pytest.mark.parametrize("name", ENDLESS)
def test_nobody_waits_for_it(serve: Serve, key_file: Path, name: str) -> None:
    with answering(ENDLESS[name]) as hostile:
        flags = (f"--cache.redis-url={hostile.url}", f"--cache.key-file={key_file}")
        with serve(*ON, *flags) as server:
            attacked(server, name)
        assert hostile.used_up == 0


def attacked(server: Server, name: str) -> None:
    before = server.rss()
    with watched(server) as gaps:
        for number in itertools.count():
            answer = server.generation.Generate(greedy(f"{name} {number}", 4), timeout=60)
            assert answer.text
            if number >= ASKED and len(gaps) > WATCHED:
                break
    assert max(gaps) < GAP, (name, sorted(gaps)[-3:])
    assert server.rss() - before < HELD, name
    counts = dict(server.load().cache_counts)
    assert sum(count for what, count in counts.items() if what.startswith("cache_fault")) > 0, (name, counts)


@contextlib.contextmanager
def watched(server: Server) -> Iterator[list[float]]:
    """Seconds between the messages of a stream, and that health checks took, meanwhile."""
    gaps: list[float] = []
    over = threading.Event()

    def probe() -> None:
        with grpc.insecure_channel(server.health) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not over.is_set():
                begun = time.monotonic()
                stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
                gaps.append(time.monotonic() - begun)
                over.wait(PLAIN)

    def stream() -> None:
        last = None
        call = server.generation.GenerateStream(as_stream(greedy("beside", 400)), timeout=120)
        for _ in call:
            now = time.monotonic()
            if over.is_set():
                call.cancel()
                return
            if last is not None:
                gaps.append(now - last)
            last = now

    threads = [threading.Thread(target=probe), threading.Thread(target=stream)]
    for thread in threads:
        thread.start()
    try:
        yield gaps
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_server_survives_all_of_them_in_turns(serve: Serve, key_file: Path) -> None:
    """One front, whose Redis answers in each way, one after the other: its memory stays where it was."""
    with answering(Reply(b"", b"")) as hostile:
        flags = (f"--cache.redis-url={hostile.url}", f"--cache.key-file={key_file}")
        with serve(*ON, *flags) as server:
            before = server.rss()
            for name, reply in ENDLESS.items():
                hostile.reply = reply
                for number in range(ASKED):
                    assert server.generation.Generate(greedy(f"{name} {number}", 4), timeout=60).text
            assert server.rss() - before < HELD
