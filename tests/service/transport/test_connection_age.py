"""Connections that reach their age are made anew, and no call notices."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator

import grpc
import pytest

from bench.grpc_frames import FrameClient
from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1 import generation_pb2_grpc
from tests.service.conftest import PATIENCE, Server, ask_stream

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
STREAM = "/whippet.v1.GenerationService/GenerateStream"
TOKENS = 40


@pytest.fixture(scope="module")
def aging(serve: Serve) -> Iterator[Server]:
    """Streams last for two or three times the age of a connection."""
    with serve("--limits.connection-age=0.1", "--fake.step-time=0.005") as one:
        yield one
        assert one.stop() == 0


def test_a_stream_outlives_its_connections_age(aging: Server) -> None:
    """Its server has said that it takes no other call there, and goes on with this one."""
    with FrameClient(aging.data, time.monotonic) as client:
        client.socket.settimeout(PATIENCE)
        stream = client.streams[client.start(STREAM, ask_stream("old", 1000).SerializeToString())]
        while client.last_stream != 1:
            assert client.read()
        assert stream.status is None
        before = stream.messages
        while stream.messages < before + 100:
            assert client.read()


async def test_clients_connect_anew_and_no_call_fails(aging: Server) -> None:
    """None of them tries again by itself."""
    ends: Counter[str] = Counter()
    connections: Counter[int] = Counter()
    enough = 3

    async def count(channel: grpc.aio.Channel, number: int) -> None:
        while True:
            state = channel.get_state()
            connections[number] += state is grpc.ChannelConnectivity.READY
            await channel.wait_for_state_change(state)

    async def call(number: int) -> None:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
        async with grpc.aio.insecure_channel(aging.data, options=options) as channel:
            counting = asyncio.create_task(count(channel, number))
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            while connections[number] < enough:
                request = pb.GenerateStreamRequest.FromString(ask_stream("x", TOKENS).SerializeToString())
                try:
                    messages = [message async for message in stub.GenerateStream(request, timeout=PATIENCE)]
                    ends["whole" if len(messages) == TOKENS else "cut short"] += 1
                except grpc.aio.AioRpcError as error:
                    ends[f"{error.code()}: {error.details()}"] += 1
            counting.cancel()

    async with asyncio.timeout(PATIENCE * 3):
        await asyncio.gather(*(call(number) for number in range(8)))
    assert set(ends) == {"whole"}, ends
