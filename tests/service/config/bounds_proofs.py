"""Proofs for what callers may send: ports and inboxes that are opened as the settings say."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import MagicMock

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.grpc_frames import FrameClient
from service.config.settings import Settings
from service.observability.record import Observers
from service.transport.call.http2 import PortBounds
from service.transport.call.inbox import SMALL, Inbox, InboxBounds
from service.transport.port.health import Health
from service.transport.ports import open_port
from service.transport.process.descriptors import divide
from tests.service.config.proofs import Proof, Tools, becomes
from tests.service.conftest import PATIENCE

_SETTINGS_FRAME, _MAX_CONCURRENT_STREAMS = 4, 3
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


@asynccontextmanager
async def data_port(settings: Settings) -> AsyncIterator[str]:
    """Its address; it has health alone."""
    limits = settings.limits
    bounds = PortBounds(
        divide(limits.connections).connections, limits.connection_calls, limits.message_bytes, limits.connection_age
    )
    health = Health(lambda: True, lambda: True).handlers(Inbox(SMALL, Counter()), Observers())
    port = open_port("listen", "127.0.0.1:0", [health], None, bounds)
    await port.server.start()
    try:
        yield port.address
    finally:
        await port.server.stop(None)


def spoken_to(address: str, count: int) -> list[bytes]:
    """What the server says first on each of `count` connections; nothing on those that it closes."""
    host, _, port = address.rpartition(":")
    sockets = [socket.create_connection((host, int(port)), 60) for _ in range(count)]
    said = []
    for one in sockets:
        try:
            one.sendall(_PREFACE)
            said.append(one.recv(4096))
        except ConnectionError:
            said.append(b"")
    for one in sockets:
        one.close()
    return said


async def open_connections(settings: Settings, tools: Tools) -> int:
    """Of six."""
    async with data_port(settings) as address:
        return sum(bool(said) for said in await asyncio.to_thread(spoken_to, address, 6))


async def most_calls(settings: Settings, tools: Tools) -> int:
    """That a connection is told it may have."""
    async with data_port(settings) as address:
        (said,) = await asyncio.to_thread(spoken_to, address, 1)
    size, kind = int.from_bytes(said[:3], "big"), said[3]
    assert kind == _SETTINGS_FRAME
    return dict(struct.iter_unpack(">HI", said[9 : 9 + size]))[_MAX_CONCURRENT_STREAMS]


async def is_sent_away(settings: Settings, tools: Tools) -> bool:
    """Whether an idle connection hears GOAWAY: within a second, or the patience of a test where it must."""

    def wait(address: str) -> bool:
        with FrameClient(address, time.monotonic) as client:
            client.socket.settimeout(1.0 if settings.limits.connection_age is None else PATIENCE)
            try:
                while client.last_stream is None and client.read():
                    pass
            except TimeoutError:
                return False
            return client.last_stream is not None

    async with data_port(settings) as address:
        return await asyncio.to_thread(wait, address)


async def answer_to_100_kb(settings: Settings, tools: Tools) -> grpc.StatusCode:
    async with data_port(settings) as address, grpc.aio.insecure_channel(address) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="x" * 100_000))
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def readers(settings: Settings, tools: Tools) -> int:
    """Of a hundred callers whose messages do not come, how many are read from at once."""
    limits = settings.limits
    inbox = Inbox(InboxBounds(limits.message_bytes, limits.live_message_bytes), Counter())
    reading = 0

    async def read() -> None:
        nonlocal reading
        reading += 1
        await asyncio.get_running_loop().create_future()

    async def call(number: int) -> None:
        context = MagicMock(peer=lambda: str(number), read=read)
        with inbox.open(context, "t") as incoming:
            await incoming.read()

    calls = [asyncio.create_task(call(number)) for number in range(100)]
    for _ in range(10):
        await asyncio.sleep(0)
    for one in calls:
        one.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    return reading


PROOFS = {
    "limits.connections": Proof("3", open_connections, becomes(6, 3)),
    "limits.connection-calls": Proof("7", most_calls, becomes(256, 7)),
    "limits.connection-age": Proof("0.1", is_sent_away, becomes(False, True)),
    "limits.message-bytes": Proof(
        "65536", answer_to_100_kb, becomes(grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED)
    ),
    "limits.live-message-bytes": Proof("16777216", readers, becomes(32, 2)),
}
