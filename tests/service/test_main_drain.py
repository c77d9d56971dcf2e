"""A drain as direct clients see it that call again at once, whatever they hear, each on one connection or on a new one
for every call."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable

import grpc
import pytest

from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1 import generation_pb2_grpc
from tests.service.conftest import PATIENCE, Server, ask_stream

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 50),
)


class Caller:
    """Calls until the server is gone, and counts how calls end."""

    def __init__(self, server: Server, ends: Counter[str], reconnects: bool) -> None:
        self._server = server
        self._ends = ends
        self._reconnects = reconnects
        self.was_told = False  # by a refusal with a retry hint

    async def run(self) -> None:
        channel = grpc.aio.insecure_channel(self._server.data, options=OPTIONS)
        while self._server.process.poll() is None:
            if self._reconnects:
                await channel.close()
                channel = grpc.aio.insecure_channel(self._server.data, options=OPTIONS)
            self._ends[await self._call(generation_pb2_grpc.GenerationServiceStub(channel))] += 1
        await channel.close()

    async def _call(self, stub: generation_pb2_grpc.GenerationServiceStub) -> str:
        request = pb.GenerateStreamRequest.FromString(ask_stream("x", 10).SerializeToString())
        try:
            async for _ in stub.GenerateStream(request, timeout=PATIENCE):
                pass
        except grpc.aio.AioRpcError as error:
            trailers = dict(error.trailing_metadata() or ())
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                return f"{error.code()}: {error.details()}"
            if "grpc-retry-pushback-ms" in trailers:
                self.was_told = True
                return "told"
            return "no connection"  # of the channel's own making, which a client tries again
        return "answered"


@pytest.mark.parametrize("reconnects", [False, True], ids=["one connection", "a new one for each call"])
async def test_no_call_is_cancelled_in_a_drain(serve: Serve, reconnects: bool) -> None:
    with serve("--fake.step-time=0.002", "--drain.timeout=20") as server:
        ends: Counter[str] = Counter()
        callers = [Caller(server, ends, reconnects) for _ in range(12)]
        tasks = [asyncio.create_task(caller.run()) for caller in callers]
        async with asyncio.timeout(PATIENCE * 2):
            while ends["answered"] < 3 * len(callers):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            server.process.terminate()
            await asyncio.gather(*tasks)
        assert set(ends) <= {"answered", "told", "no connection"}, ends
        assert sum(caller.was_told for caller in callers) > len(callers) / 2
        assert server.process.wait(PATIENCE) == 0
