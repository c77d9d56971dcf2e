"""A drain: its order, and as direct clients see it that call again at once, whatever they hear, each on one connection
or on a new one for every call."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.grpc_frames import FrameClient
from service.pb.whippet.v1 import admin_pb2, generation_pb2_grpc
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.conftest import PATIENCE, Server, ask, ask_stream, refused

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
GENERATE_STREAM = "/whippet.v1.GenerationService/GenerateStream"
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
        self.was_told = False  # by a refusal with a retry hint

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
                self.was_told = True
                return "told"
            return "no connection"  # of the channel's own making, which a client tries again
        return "answered"


@pytest.mark.parametrize("reconnects", [False, True], ids=["one connection", "a new one for each call"])
async def test_no_call_is_cancelled_in_a_drain(serve: Serve, reconnects: bool) -> None:
    """By a server and of clients that get the processor when they want it."""
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
        assert sum(caller.was_told for caller in callers) > len(callers) / 2 or busy
        assert server.process.wait(PATIENCE) == 0


def serving(server: Server) -> Iterator[bool]:
    """Whether it is ready, whenever that changes."""
    with grpc.insecure_channel(server.health) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="whippet.v1.GenerationService"), timeout=PATIENCE * 3
        )
        for message in watch:
            yield message.status == health_pb2.HealthCheckResponse.SERVING


def test_in_the_delay_a_server_says_not_serving_and_serves(serve: Serve) -> None:
    """A second signal ends the delay as well."""
    with serve("--drain.delay=600") as server:
        ready = serving(server)
        assert next(ready)
        server.process.terminate()
        assert not next(ready)
        for _ in range(3):
            assert server.generation.Generate(ask("late", 3), timeout=PATIENCE).text
        left = server.admin.Drain(admin_pb2.DrainRequest(timeout=Duration(nanos=1_000_000)), timeout=PATIENCE)
        assert (left.remaining, left.admitting) == (0, True)
        assert server.process.poll() is None
        assert server.stop() == 0


def test_after_the_delay_connections_get_goaway_and_what_runs_goes_on(serve: Serve) -> None:
    """The data port is closed though a stream is live on it; the other ports are open until the end."""
    with serve("--drain.delay=0.2", "--drain.timeout=600", "--fake.step-time=0.02") as server:
        client = FrameClient(server.data, time.monotonic)
        client.socket.settimeout(PATIENCE)
        client.start(GENERATE_STREAM, ask_stream("long", 4000, request_id="long").SerializeToString())
        client.read()
        server.process.terminate()
        while client.last_stream is None or client.last_stream > 1:  # the first GOAWAY names no stream, the second ours
            assert client.read()
        host, _, port = server.data.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), PATIENCE).close()
        before = client.messages
        while client.messages < before + 5:
            assert client.read()
        assert not next(serving(server))
        assert server.load().state == admin_pb2.ENGINE_STATE_DRAINING
        stopping = refused(server.admin.Undrain, admin_pb2.UndrainRequest())
        assert (stopping.code, stopping.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STOPPING")
        server.admin.AbortGeneration(admin_pb2.AbortGenerationRequest(request_id="long"), timeout=PATIENCE)
        while not client.ended:
            assert client.read()
        assert client.streams[1].status == grpc.StatusCode.ABORTED.value[0]
        client.close()
        assert server.process.wait(PATIENCE) == 0


def test_a_drain_by_an_operator_is_undone(serve: Serve) -> None:
    with serve("--fake.step-time=0.02") as server:
        ready = serving(server)
        assert next(ready)
        for _ in range(2):
            live = server.generation.GenerateStream(ask_stream("live", 4000), timeout=PATIENCE * 3)
            next(live)
            waiting = server.admin.Drain.future(admin_pb2.DrainRequest(), timeout=PATIENCE * 3)
            assert not next(ready)
            assert refused(server.generation.Generate, ask("x", 1)).reason == "DRAINING"
            server.admin.Undrain(admin_pb2.UndrainRequest(), timeout=PATIENCE)
            assert next(ready)
            assert server.generation.Generate(ask("back", 3), timeout=PATIENCE).text
            told = waiting.result()
            assert (told.remaining, told.admitting) == (1, True)
            next(live)
            live.cancel()
            server.idle()
        assert server.stop() == 0


async def test_each_call_of_a_client_that_does_not_wait_for_answers_ends(serve: Serve) -> None:
    """Two connections, a call every two milliseconds whatever becomes of those before. Some arrive within the
    milliseconds of closing, and are dropped by gRPC itself (docs, Known limits)."""
    with serve("--fake.step-time=0.001") as server:
        callers = [Caller(server, Counter(), reconnects=False) for _ in range(2)]
        calls: set[asyncio.Task[str]] = set()
        async with contextlib.AsyncExitStack() as stack:
            stubs = []
            for _ in callers:
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.data, options=OPTIONS))
                stubs.append(generation_pb2_grpc.GenerationServiceStub(channel))
            while server.process.poll() is None:
                for caller, stub in zip(callers, stubs, strict=True):
                    calls.add(asyncio.create_task(caller.call(stub)))
                if len(calls) == 200:
                    server.process.terminate()
                await asyncio.sleep(0.004)
            async with asyncio.timeout(PATIENCE):
                ends = Counter(await asyncio.gather(*calls))
        assert set(ends) <= {"answered", "told", "no connection", CANCELLED}, ends
        assert server.process.wait(PATIENCE) == 0
