"""A drain as direct clients see it that call again at once, whatever they hear, each on one connection or on a new one
for every call. They and the server need the processor when they want it, so nothing else runs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
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


CANCELLED = "StatusCode.CANCELLED: CANCELLED"
BUSY = 0.03  # seconds; where five milliseconds took so long, a client may have looked like one that calls no more


class Pauses:
    """Tells how busy the machine is."""

    def __init__(self) -> None:
        self.longest = 0.0  # seconds that five milliseconds took

    async def watch(self) -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(0.005)
            self.longest = max(self.longest, time.monotonic() - begun)


class Caller:
    """Calls until the server is gone, and counts how calls end."""

    def __init__(self, server: Server, ends: Counter[str], reconnects: bool) -> None:
        self._server = server
        self._ends = ends
        self._reconnects = reconnects

    async def run(self) -> None:
        channel = grpc.aio.insecure_channel(self._server.data, options=OPTIONS)
        while self._server.process.poll() is None:
            if self._reconnects:
                await channel.close()
                channel = grpc.aio.insecure_channel(self._server.data, options=OPTIONS)
            self._ends[await self.call(generation_pb2_grpc.GenerationServiceStub(channel))] += 1
        await channel.close()

    async def call(self, stub: generation_pb2_grpc.GenerationServiceStub) -> str:
        request = pb.GenerateStreamRequest.FromString(ask_stream("x", 10).SerializeToString())
        try:
            async for _ in stub.GenerateStream(request, timeout=PATIENCE):
                pass
        except grpc.aio.AioRpcError as error:
            trailers = dict(error.trailing_metadata() or ())
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                return f"{error.code()}: {error.details()}"
            if "grpc-retry-pushback-ms" in trailers:
                return "told"
            return "no connection"  # of the channel's own making, which a client tries again
        return "answered"


@pytest.mark.parametrize("reconnects", [False, True], ids=["one connection", "a new one for each call"])
async def test_no_call_is_cancelled_in_a_drain(serve: Serve, reconnects: bool) -> None:
    with serve("--fake.step-time=0.002", "--drain.timeout=20") as server:
        ends: Counter[str] = Counter()
        callers = [Caller(server, ends, reconnects) for _ in range(12)]
        tasks = [asyncio.create_task(caller.run()) for caller in callers]
        pauses = Pauses()
        async with asyncio.timeout(PATIENCE * 2):
            while ends["answered"] < 3 * len(callers):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            watching = asyncio.create_task(pauses.watch())
            server.process.terminate()
            await asyncio.gather(*tasks)
        watching.cancel()
        busy = pauses.longest > BUSY
        if busy:
            ends.pop(CANCELLED, None)
        assert set(ends) <= {"answered", "told", "no connection"}, (pauses.longest, ends)
        assert ends["told"] or busy, ends
        assert server.process.wait(PATIENCE) == 0


async def test_each_call_of_a_client_that_does_not_wait_for_answers_ends(serve: Serve) -> None:
    """Two connections, a call every two milliseconds whatever becomes of those before. Those that arrive within the
    milliseconds of closing are dropped by gRPC itself (docs, Known limits), and no others: all before are answered or
    told, and all after find no connection."""
    with serve("--fake.step-time=0.001") as server:
        callers = [Caller(server, Counter(), reconnects=False) for _ in range(2)]
        calls: list[list[asyncio.Task[str]]] = [[] for _ in callers]  # in the order in which they began
        async with contextlib.AsyncExitStack() as stack:
            stubs = []
            for _ in callers:
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.data, options=OPTIONS))
                stubs.append(generation_pb2_grpc.GenerationServiceStub(channel))
            while server.process.poll() is None:
                for caller, stub, begun in zip(callers, stubs, calls, strict=True):
                    begun.append(asyncio.create_task(caller.call(stub)))
                if len(calls[0]) == 100:
                    server.process.terminate()
                await asyncio.sleep(0.004)
            async with asyncio.timeout(PATIENCE):
                ends = [await asyncio.gather(*begun) for begun in calls]
        for one in ends:
            turns = [end for end, _ in itertools.groupby({"told": "answered"}.get(end, end) for end in one)]
            assert turns in (["answered", "no connection"], ["answered", CANCELLED, "no connection"]), turns
        assert server.process.wait(PATIENCE) == 0
