"""A refusal costs what a small call costs, not what an answer costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import grpc
import pytest

from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.asked import as_stream, greedy
from tests.service.conftest import ask, ask_stream, refused

CACHED = ("--optimizations.response-cache=true",)


def seconds(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


@pytest.mark.parametrize("caches", [(), CACHED], ids=["without caches", "with caches"])
def test_a_refusal_where_the_queue_is_full_is_a_small_call(serve, caches):
    flags = ("--fake.step-time=0.01", "--scheduler.max-sequences=2", "--limits.queued-requests=1")
    with serve(*flags, *caches) as server:
        calls = [server.generation.GenerateStream(ask_stream(f"busy {n}", 4000), timeout=120) for n in range(3)]
        server.until(lambda load: load.running + load.waiting == 3)
        refusals, small = [], []

        def refuse(number: int) -> None:
            request = greedy(f"unknown {number}") if caches else ask(f"unknown {number}", 1)
            if number % 2:
                refusal = refused(server.generation.Generate, request)
            else:
                refusal = refused(server.generation.GenerateStream, as_stream(request))
            assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED

        for number in range(40):
            refusals.append(seconds(lambda number=number: refuse(number)))
            small.append(seconds(lambda: server.generation.Tokenize(pb.TokenizeRequest(text="one"), timeout=60)))
        assert statistics.median(refusals) < 6 * statistics.median(small)
        for call in calls:
            call.cancel()
        server.idle()
