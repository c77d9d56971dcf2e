"""The metrics port: nobody can hold it up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics

from service.config.settings import BadSettings
from service.observability import scrape
from service.observability.scrape import MetricsPort
from service.transport.ports import PortTaken
from tests.service.scraped import fetch


@pytest.fixture
async def port() -> AsyncIterator[MetricsPort]:
    one = MetricsPort("metrics-listen", "127.0.0.1:0", lambda: [])
    await one.start()
    yield one
    await one.stop()


async def exchange(port: MetricsPort, request: bytes) -> bytes:
    host, _, number = port.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /metrics?name=a HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\r\nno colon\r\n: \r\n\r\n", 200),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"\xff\xfe\r\n\r\n", 404),
        (b"\r\n\r\n", 404),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 10_000 + b"\r\n\r\n", 431),
    ],
)
async def test_what_is_asked_and_answered(port: MetricsPort, request_: bytes, code: int) -> None:
    answer = await exchange(port, request_)
    assert answer.startswith(b"HTTP/1.1 %d " % code)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert (b"process_" in body) == (code == 200)


async def test_head_has_no_body(port: MetricsPort) -> None:
    head, _, body = (await exchange(port, b"HEAD /metrics HTTP/1.1\r\n\r\n")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body == b""


async def test_openmetrics_where_it_is_asked_for(port: MetricsPort) -> None:
    text = await asyncio.to_thread(
        fetch, f"http://{port.address}/metrics", "application/openmetrics-text;version=1.0.0"
    )
    assert list(openmetrics.text_string_to_metric_families(text))


async def test_who_is_silent_holds_nobody_up(port: MetricsPort) -> None:
    """Three times as many as there is room for: those that came first go, and a scrape is answered as ever."""
    host, _, number = port.address.rpartition(":")
    silent = [await asyncio.open_connection(host, int(number)) for _ in range(3 * scrape._MAX_CONNECTIONS)]
    for _ in range(5):
        assert b" 200 " in await exchange(port, b"GET /metrics HTTP/1.1\r\n\r\n")
    gone = [reader for reader, _ in silent[: 2 * scrape._MAX_CONNECTIONS]]
    assert await asyncio.wait_for(asyncio.gather(*(end_of(reader) for reader in gone)), 60) == [b""] * len(gone)
    for _, writer in silent:
        writer.close()


async def end_of(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


async def test_a_connection_that_is_closed_before_its_task_begins_is_closed(
    port: MetricsPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both connections arrive in one iteration of the loop, so that the second evicts the first at once."""
    monkeypatch.setattr(scrape, "_MAX_CONNECTIONS", 1)
    host, _, number = port.address.rpartition(":")
    with socket.create_connection((host, int(number)), 60) as first, socket.create_connection((host, int(number)), 60):
        reader, writer = await asyncio.open_connection(sock=first)
        assert await asyncio.wait_for(end_of(reader), 60) == b""
        writer.close()


async def test_who_asks_and_does_not_read_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there is room for, and their pages are larger than what the kernel holds for them."""
    text = Metric("large", "x" * 30_000_000, "gauge")
    one = MetricsPort("metrics-listen", "127.0.0.1:0", lambda: [text] if large else [])
    large, host = True, "127.0.0.1"
    monkeypatch.setattr(scrape, "_MAX_CONNECTIONS", 3)
    await one.start()
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                asks = stack.enter_context(socket.create_connection((host, int(one.address.rpartition(":")[2])), 60))
                asks.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            async with asyncio.timeout(60):
                while len(one._clients) < 3 or one._silent:  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.01)
            large = False
            assert b" 200 " in await exchange(one, b"GET /metrics HTTP/1.1\r\n\r\n")
    finally:
        await one.stop()


async def test_who_stays_silent_is_hung_up_on(port: MetricsPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_TIMEOUT_HEAD", 0.05)
    host, _, number = port.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text; version=one",
        "application/openmetrics-text;version=1.0.0;escaping=nothing",
        "application/openmetrics-text; version=9999999999.1",
        "text/plain; version=; escaping=",
        "text/plain; version=-1",
        "application/openmetrics-text; version=1.0.0\n X: injected",
        "\xff\xfe",
        ";;;,,,===",
    ],
)
async def test_an_odd_accept_header_gets_a_page(port: MetricsPort, accept: str) -> None:
    head = f"GET /metrics HTTP/1.1\r\nAccept: {accept}\r\n\r\n".encode("latin-1")
    answer = await exchange(port, head)
    assert b" 200 " in answer.splitlines()[0]
    assert b"injected" not in answer


async def test_what_breaks_while_reading_is_500(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> list[object]:
        raise RuntimeError("no")

    port = MetricsPort("metrics-listen", "127.0.0.1:0", broken)  # type: ignore[arg-type]
    await port.start()
    assert b" 500 " in await exchange(port, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert "could not be read" in caplog.text
    await port.stop()


async def test_stopping_ends_what_is_under_way(port: MetricsPort) -> None:
    host, _, number = port.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(port.stop(), 60)
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(number))


def test_ports_that_cannot_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PortTaken, match=address):
            MetricsPort("metrics-listen", address, lambda: [])
    with pytest.raises(BadSettings, match="metrics-listen"):
        MetricsPort("metrics-listen", "no-such-host.invalid:0", lambda: [])
