"""Readers that are slow or never read: they cost a bounded buffer for a bounded time, and their neighbours nothing."""

from __future__ import annotations

import base64
import contextlib
import struct
import time
from collections.abc import Callable

import pytest

from bench.grpc_frames import FrameClient
from tests.service.conftest import Server, ask_stream

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
STREAM = "/whippet.v1.GenerationService/GenerateStream"
LONG = ("--fake.max-context=200000", "--fake.total-pages=60000", "--log-level=warning")
NARROW = 65_535  # bytes of HTTP/2 window: what a client grants that does not read


def stuck(server: Server, tokens: int, count: int = 1) -> FrameClient:
    """A client that asks and never reads, but for the server's settings: who does not confirm those is cut off."""
    client = FrameClient(server.data, time.monotonic, stream_window=NARROW)
    assert client.read()
    for number in range(count):
        client.start(STREAM, ask_stream(f"stuck {number}", tokens).SerializeToString())
    return client


def widen(client: FrameClient, stream_id: int) -> None:
    """Grants the stream a window without end."""
    client.socket.sendall(b"\0\0\4\x08\0" + struct.pack(">II", stream_id, (1 << 31) - 1 - NARROW))


def finish(client: FrameClient) -> None:
    """Reads until every stream has ended."""
    client.socket.settimeout(60)
    while client.ended < len(client.streams):
        assert client.read()


def settled(server: Server) -> int:
    """Tokens made once the sequence has paused for good; before that it may pause and go on while gRPC still takes."""
    before = -1
    for _ in range(60):
        load = server.until(lambda load: load.paused == 1)
        if load.generated_tokens == before:
            return before
        before = load.generated_tokens
        time.sleep(0.5)
    raise AssertionError("it never stood still")


def test_a_sequence_pauses_while_its_reader_is_behind_and_then_goes_on(serve: Serve) -> None:
    with serve(*LONG) as server:
        client = stuck(server, 20_000)
        made = settled(server)
        assert made < 18_000  # a window's worth, and the cap
        for stream_id in client.streams:
            widen(client, stream_id)
        finish(client)
        assert [stream.status for stream in client.streams.values()] == [0]
        assert client.messages == 20_000
        client.close()
        server.idle()


@pytest.mark.proof
def test_a_reader_that_never_reads_is_ended(serve: Serve) -> None:
    with serve(*LONG, "--stream.stall-timeout=1") as server:
        client = stuck(server, 190_000, count=3)
        server.until(lambda load: load.generated_tokens > 3000)
        server.idle(60)  # freed, although the client has not heard of it
        for stream_id in client.streams:
            widen(client, stream_id)
        finish(client)
        assert [stream.status for stream in client.streams.values()] == [10] * 3  # ABORTED
        assert all(b"STREAM_STALLED" in _details(stream.headers) for stream in client.streams.values())
        assert 0 < client.messages < 100_000
        client.close()
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


def _details(headers: dict[str, str]) -> bytes:
    packed = headers["grpc-status-details-bin"]
    return base64.b64decode(packed + "=" * (-len(packed) % 4))


def test_a_slow_reader_that_reads_is_not_ended(serve: Serve) -> None:
    with serve(*LONG, "--stream.stall-timeout=1") as server:
        client = FrameClient(server.data, time.monotonic, stream_window=2000)
        client.start(STREAM, ask_stream("slow", 400).SerializeToString())
        client.socket.settimeout(60)
        given = 2000
        while client.ended < 1:
            assert client.read()
            if client.messages * 8 > given - 1500:
                time.sleep(0.3)
                client.socket.sendall(b"\0\0\4\x08\0" + struct.pack(">II", 1, 1500))
                given += 1500
        assert client.streams[1].status == 0
        assert client.messages == 400
        client.close()


@pytest.mark.proof
def test_a_stalled_connection_that_breaks_leaves_nothing(serve: Serve) -> None:
    with serve(*LONG, "--stream.stall-timeout=1") as server:
        for turn in range(1, 4):
            client = stuck(server, 190_000, count=4)
            enough = turn * 10_000
            server.until(lambda load, enough=enough: load.generated_tokens > enough or load.paused > 0, 60)
            client.close()
            server.idle()
        assert server.stop() == 0
