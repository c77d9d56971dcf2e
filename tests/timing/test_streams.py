"""When a stream's messages come, against the time that the engine itself counted for them."""

from __future__ import annotations

import itertools
import statistics
import time

from bench.grpc_frames import FrameClient
from tests.service.conftest import Server, ask, ask_stream
from tests.service.protocols.whippet_v1.test_slow_reader import LONG, STREAM, finish


def test_timings_add_up(serve):
    with serve("--fake.step-time=0.02") as slow:
        started = time.monotonic()
        timings = slow.generation.Generate(ask("timed", 11), timeout=60).finish.timings
        took = time.monotonic() - started
        parts = [timings.queue, timings.cache_lookup, timings.prefill, timings.decode]
        total = sum(part.ToNanoseconds() for part in parts) / 1e9
        assert 0.19 < timings.decode.ToNanoseconds() / 1e9 < took
        assert took * 0.5 < total <= took


def test_one_token_is_not_held_back(serve):
    """The time between two messages is that between two tokens."""
    with serve("--fake.step-time=0.01") as slow:
        arrivals = []
        for message in slow.generation.GenerateStream(ask_stream("alone", 30), timeout=60):
            arrivals.append(time.monotonic())
            last = message
        gaps = [late - early for early, late in itertools.pairwise(arrivals)]
        step = last.finish.timings.decode.ToNanoseconds() / 1e9 / 29
        assert statistics.median(gaps) < 3 * step


def paced(server: Server, streams: int, tokens: int) -> float:
    """Seconds that streams whose client reads take together."""
    client = FrameClient(server.data, time.monotonic)
    started = time.monotonic()
    for number in range(streams):
        client.start(STREAM, ask_stream(f"good {number}", tokens).SerializeToString())
    finish(client)
    client.close()
    return time.monotonic() - started


def test_neighbours_of_a_reader_that_never_reads(serve):
    with serve(*LONG, "--fake.step-time=0.003") as server:
        alone, beside = [], []
        for _ in range(3):
            alone.append(paced(server, 4, 100))
            client = FrameClient(server.data, time.monotonic, stream_window=500)
            for number in range(4):
                client.start(STREAM, ask_stream(f"stuck {number}", 150_000).SerializeToString())
            begun = server.load().generated_tokens
            server.until(lambda load, begun=begun: load.generated_tokens > begun + 4 * 150)
            beside.append(paced(server, 4, 100))
            client.close()
            server.idle()
        assert min(beside) < 1.5 * min(alone)
        assert server.generation.Generate(ask("fine", 3), timeout=60).text
