"""A drain: its order, and the way back."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.grpc_frames import FrameClient
from service.pb.whippet.v1 import admin_pb2
from tests.service.conftest import PATIENCE, Server, ask, ask_stream, refused

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
GENERATE_STREAM = "/whippet.v1.GenerationService/GenerateStream"


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
