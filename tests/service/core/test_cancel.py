"""Streams that nobody wants any more: ten thousand of them leave nothing behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.grpc_frames import FrameClient
from tests.service.conftest import Server, ask, ask_stream

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
STREAM = "/whippet.v1.GenerationService/GenerateStream"
UNARY = "/whippet.v1.GenerationService/Generate"


def storm(server: Server, count: int, at_once: int) -> int:
    """Starts `count` answers and cancels each: at once, soon, or once it has tokens. How many had some."""
    client = FrameClient(server.data, time.monotonic)
    bodies = [ask_stream(f"storm {n}", 3000).SerializeToString() for n in range(at_once)]
    live: list[int] = []
    with_tokens = started = 0
    while started < count or live:
        while started < count and len(live) < at_once:
            live.append(client.start(UNARY if started % 5 == 1 else STREAM, bodies[started % at_once]))
            started += 1
            if started % 5 == 0:
                client.reset(live.pop())
        client.read()
        patient = [n for n in live if n // 2 % 5 in (2, 3) and not client.streams[n].messages]
        for stream_id in set(live).difference(patient):
            with_tokens += client.streams[stream_id].messages > 0
            client.reset(stream_id)
        live = patient
    client.close()
    return with_tokens


def descriptors(server: Server) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


@pytest.mark.proof
def test_ten_thousand_cancelled_streams_leave_nothing(serve: Serve) -> None:
    many = (
        "--limits.queued-requests=2000",
        "--limits.connection-calls=4000",
    )  # those that were reset count for a moment
    with serve(*many, "--scheduler.max-sequences=64", "--log-level=warning") as server:
        pid = server.engine_pid()
        storm(server, 2000, 100)
        server.idle()
        before, files = server.rss(), descriptors(server)
        with_tokens = sum(storm(server, 2000, 100) for _ in range(4))
        assert with_tokens > 2000  # otherwise nothing was cancelled in the middle
        load = server.idle()
        assert (load.running, load.waiting, load.paused, load.used_pages) == (0, 0, 0, 0)
        grown = server.rss() - before
        assert grown < 12 * 2**20, f"{grown / 2**20:.1f} MiB"
        assert descriptors(server) <= files + 2
        assert (server.engine_pid(), load.restarts) == (pid, 0)
        assert len(server.generation.Generate(ask("alive", 5), timeout=60).text) == 5
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


def test_a_connection_that_breaks_frees_all_its_streams(serve: Serve) -> None:
    with serve("--fake.step-time=0.002") as server:
        for _ in range(5):
            client = FrameClient(server.data, time.monotonic)
            for number in range(40):
                client.start(STREAM, ask_stream(f"gone {number}", 3000).SerializeToString())
            while client.messages < 100:
                assert client.read()
            client.close()
        server.idle()
