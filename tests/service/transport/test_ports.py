"""The ports: HTTP/2 set-up, TLS, reflection, health, and what models and admins are told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from bench.floods import Rogue
from bench.grpc_frames import ACK, PING, SETTINGS, FrameClient, frame
from service.pb.whippet.v1 import admin_pb2, model_pb2
from service.transport.call import http2
from service.transport.call.http2 import PortBounds
from service.transport.ports import SIDE_BOUNDS, open_port
from tests.service.conftest import Server, all_flags, ask, ask_stream, refused
from tests.service.forked import Template

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
GENERATION = "whippet.v1.GenerationService"


def test_reflection_lists_what_each_port_has(server: Server) -> None:
    data = ProtoReflectionDescriptorDatabase(server.channel)
    always = {
        "grpc.health.v1.Health",
        *(f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha")),
    }
    others = {"vllm.grpc.engine.VllmEngine", "inference.GRPCInferenceService"}
    assert set(data.get_services()) == {GENERATION, "whippet.v1.ModelService", *others, *always}
    admin = ProtoReflectionDescriptorDatabase(server.admin_channel)
    assert set(admin.get_services()) == {"whippet.v1.AdminService", *always}
    methods = data.FindFileContainingSymbol(GENERATION).service[0].method
    assert {method.name for method in methods} == {"Generate", "GenerateStream", "Tokenize", "Detokenize"}


def test_admin_methods_are_not_on_the_data_port(server: Server) -> None:
    call = server.channel.unary_unary("/whippet.v1.AdminService/GetLoad")
    assert refused(call, b"").code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("port", ["data", "admin_address", "health"])
def test_health_is_on_every_port(server: Server, port: str) -> None:
    with grpc.insecure_channel(getattr(server, port)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", GENERATION):
            assert health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60).status == SERVING
        refusal = refused(health.Check, health_pb2.HealthCheckRequest(service="nobody"))
        assert refusal.code is grpc.StatusCode.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest(service="nobody"), timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


@pytest.mark.proof
async def test_calls_that_nobody_could_look_at_are_dropped() -> None:
    """What waits in gRPC is bounded in time: an event loop that was held up for longer finds the newest calls only."""
    held_up, sent = threading.Event(), threading.Event()

    def hold_up() -> None:
        held_up.set()
        sent.wait(60)
        time.sleep(6.0)  # one more than a call may wait

    async def handle(request: bytes, context: object) -> bytes:
        if request == b"first":
            hold_up()
        return request

    method = grpc.unary_unary_rpc_method_handler(handle)
    handlers = [grpc.method_handlers_generic_handler("test.Service", {"Method": method})]
    port = open_port("listen", "127.0.0.1:0", handlers, None, SIDE_BOUNDS)
    await port.server.start()

    def call() -> list[grpc.StatusCode]:
        with grpc.insecure_channel(port.address) as channel:
            method = channel.unary_unary("/test.Service/Method")
            first = method.future(b"first", timeout=180)
            held_up.wait(60)
            old = [method.future(b"", timeout=180) for _ in range(50)]
            sent.set()
            assert first.result() == b"first"
            return [*(one.code() for one in old), method.future(b"", timeout=60).code()]

    try:
        *old, new = await asyncio.to_thread(call)
    finally:
        await port.server.stop(None)
    assert Counter(old)[grpc.StatusCode.CANCELLED] >= 25  # all but one or two, where what is sent also arrives at once
    assert new is grpc.StatusCode.OK


class Pinged(Rogue):
    """Knows when the server has seen all that was sent before a ping. Acknowledges the server's settings, without which
    it would be hung up on after five seconds."""

    def __init__(self, address: str, path: str) -> None:
        self.greeted, self.answered = threading.Event(), threading.Event()
        super().__init__(address, path)
        assert self.greeted.wait(60)
        self.socket.sendall(frame(SETTINGS, ACK, 0, b""))

    def _drain(self) -> None:
        end = b""
        with contextlib.suppress(OSError):
            self.socket.settimeout(None)
            while data := self.socket.recv(1 << 16):
                self.greeted.set()
                end += data
                if frame(PING, ACK, 0, b"all came") in end:
                    self.answered.set()
                end = end[-16:]


@pytest.mark.product
async def test_no_more_than_4096_calls_wait_to_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beyond them gRPC drops by itself, while the event loop is held up. Here nobody waits too long, however
    slowly they come."""
    options = [
        (name, 600 if name == "grpc.server_max_unrequested_time_in_server" else value) for name, value in http2._OPTIONS
    ]
    monkeypatch.setattr(http2, "_OPTIONS", options)
    held_up, sent = threading.Event(), threading.Event()
    seen = Counter[bytes]()

    async def handle(request: bytes, context: object) -> bytes:
        seen[request] += 1
        if request == b"first":
            held_up.set()
            sent.wait(60)
        return request

    method = grpc.unary_unary_rpc_method_handler(handle)
    handler = grpc.method_handlers_generic_handler("echo.Echo", {"Call": method})
    bounds = PortBounds(connections=64, connection_calls=256, message_bytes=1 << 16)
    port = open_port("listen", "127.0.0.1:0", (handler,), None, bounds)
    await port.server.start()

    def call() -> None:
        with grpc.insecure_channel(port.address) as channel:
            method = channel.unary_unary("/echo.Echo/Call", bytes, bytes)
            first = method.future(b"first", timeout=180)
            held_up.wait(60)
            rogues = [Pinged(port.address, "/echo.Echo/Call") for _ in range(24)]
            for rogue in rogues:
                calls = [rogue.call(b"\0\0\0\0\4many", ended=True) for _ in range(250)]
                rogue.socket.sendall(b"".join(calls) + frame(PING, 0, 0, b"all came"))
            assert all(rogue.answered.wait(60) for rogue in rogues)
            sent.set()
            assert first.result() == b"first"
            while method.future(b"last", timeout=60).code() is not grpc.StatusCode.OK:
                pass  # there is no room for it yet. Once it is answered, all that waited before it have been seen
            for rogue in rogues:
                rogue.finish()

    try:
        await asyncio.to_thread(call)
    finally:
        await port.server.stop(None)
    assert 4000 < seen[b"many"] < 4200, "of 6,000: those that waited, and some that the loop had been given already"


async def test_a_client_at_the_limit_of_its_connection_is_refused_nothing(serve: Serve) -> None:
    """Three times as many calls as a connection may have: the others wait with the client. A server for which a call
    that has just ended counts would refuse every second one."""
    with serve("--limits.connection-calls=16", "--scheduler.max-sequences=64") as one:
        async with grpc.aio.insecure_channel(one.data) as channel:
            call = channel.unary_unary(f"/{GENERATION}/Generate", bytes, bytes)

            async def ask_often(number: int) -> None:
                for again in range(8):
                    await call(ask(f"{number} {again}", 2).SerializeToString(), timeout=240)

            await asyncio.gather(*(ask_often(number) for number in range(48)))


def test_health_watch_follows_a_drain(serve: Serve) -> None:
    with serve() as one, grpc.insecure_channel(one.health) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=GENERATION), timeout=60)
        assert next(watch).status == SERVING
        assert one.admin.Drain(admin_pb2.DrainRequest(), timeout=60).remaining == 0
        assert next(watch).status == NOT_SERVING
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=60).status == SERVING  # the process lives
        assert one.load().state == admin_pb2.ENGINE_STATE_DRAINING
        refusal = refused(one.generation.Generate, ask("x", 1))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert refusal.retry_ms > 0


def test_drain_tells_what_is_left_before_its_own_deadline(serve: Serve) -> None:
    with serve("--fake.step-time=0.01") as one:
        call = one.generation.GenerateStream(ask_stream("long", 3000), timeout=60)
        next(call)
        assert one.admin.Drain(admin_pb2.DrainRequest(), timeout=1.0).remaining == 1
        assert one.admin.Drain(admin_pb2.DrainRequest(timeout=Duration(nanos=1_000_000)), timeout=60).remaining == 1
        wrong = refused(one.admin.Drain, admin_pb2.DrainRequest(timeout=Duration(seconds=-1)))
        assert wrong.fields == {"timeout"}
        call.cancel()
        assert one.admin.Drain(admin_pb2.DrainRequest(), timeout=60).remaining == 0


def test_health_watchers_that_never_read_hold_nobody_up(serve: Serve) -> None:
    with serve() as one:
        stuck = FrameClient(one.health, time.monotonic, stream_window=0)
        for _ in range(20):
            stuck.start("/grpc.health.v1.Health/Watch", b"")
        with grpc.insecure_channel(one.health) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=GENERATION), timeout=60
            )
            assert next(watch).status == SERVING
            one.admin.Drain(admin_pb2.DrainRequest(), timeout=60)
            assert next(watch).status == NOT_SERVING
        stuck.close()


def test_a_dead_engine_is_not_ready_and_then_is_again(serve: Serve) -> None:
    with serve() as one, grpc.insecure_channel(one.health) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=GENERATION), timeout=60)
        assert next(watch).status == SERVING
        subprocess.run(["kill", "-9", str(one.engine_pid())], check=True)
        assert next(watch).status == NOT_SERVING
        assert next(watch).status == SERVING
        assert one.generation.Generate(ask("back", 2), timeout=60).text


def test_models(server: Server) -> None:
    model = server.models.GetModel(model_pb2.GetModelRequest(), timeout=60).model
    assert list(server.models.ListModels(model_pb2.ListModelsRequest(), timeout=60).models) == [model]
    assert server.models.GetModel(model_pb2.GetModelRequest(name="fake"), timeout=60).model == model
    limits = model.limits
    assert (limits.max_context_tokens, limits.vocab_size, limits.max_sequences) == (4096, 256, 8)
    assert limits.max_logprobs == 20
    assert model.chat
    assert len(model.weights_digest) == len(model.tokenizer_digest) == 64
    assert not model.default_sampling.HasField("seed")
    assert model.default_sampling.temperature == 0


def test_a_model_can_be_named(serve: Serve) -> None:
    with serve("--model-name=mine") as one:
        assert one.generation.Generate(ask("x", 1, model="mine"), timeout=60).prompt_info.model == "mine"
        assert refused(one.generation.Generate, ask("x", 1, model="fake")).code is grpc.StatusCode.NOT_FOUND


def test_optimizations_are_listed_and_switched(server: Server) -> None:
    def listed() -> dict[str, bool]:
        answer = server.admin.ListOptimizations(admin_pb2.ListOptimizationsRequest(), timeout=60)
        assert all(one.description for one in answer.optimizations)
        return {one.name: one.enabled for one in answer.optimizations}

    before = server.generation.Generate(ask("greedy", 20), timeout=60).text
    at_start = listed()
    assert {"batching", "fused_kernels", "graphs"} <= {name for name, enabled in at_start.items() if enabled}
    for enabled in (False, True):
        request = admin_pb2.SetOptimizationRequest(name="batching", enabled=enabled)
        assert server.admin.SetOptimization(request, timeout=60).optimization.enabled is enabled
        assert listed() == {**at_start, "batching": enabled}
        calls = [server.generation.Generate.future(ask("greedy", 20), timeout=60) for _ in range(6)]
        assert {call.result().text for call in calls} == {before}
    unknown = refused(server.admin.SetOptimization, admin_pb2.SetOptimizationRequest(name="warp", enabled=True))
    assert unknown.code is grpc.StatusCode.UNIMPLEMENTED
    assert listed() == at_start
    unset = refused(server.admin.SetOptimization, admin_pb2.SetOptimizationRequest())
    assert unset.fields == {"name", "enabled"}
    assert server.admin.FlushCache(admin_pb2.FlushCacheRequest(), timeout=60).entries == 0


def test_load_tells_what_runs_and_waits(serve: Serve) -> None:
    with serve("--scheduler.max-sequences=2", "--fake.step-time=0.01") as one:
        calls = [one.generation.GenerateStream(ask_stream(f"n{n}", 3000), timeout=60) for n in range(5)]
        load = one.until(lambda load: load.running == 2 and load.waiting == 3)
        assert load.state == admin_pb2.ENGINE_STATE_READY
        assert 0 < load.used_pages <= load.total_pages == 4096
        assert load.page_size == 16
        for call in calls:
            call.cancel()
        assert one.idle().steps > 0


def test_a_message_above_4_mib_is_refused_and_one_below_is_read(server: Server) -> None:
    above, below = ask("x" * (4 * 2**20), 1), ask("x" * 4_000_000, 1)
    assert refused(server.generation.Generate, above).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused(server.generation.Generate, below).fields == {"text"}


@pytest.mark.proof
def test_pings_every_ten_seconds_and_faster_are_no_offence(serve: Serve) -> None:
    """A plain gRPC server hangs up on the third ping within five minutes without data."""
    with serve("--fake.step-time=1", "--log-level=warning") as one:
        client = FrameClient(one.data, time.monotonic)
        client.start("/whippet.v1.GenerationService/GenerateStream", ask_stream("silent", 2).SerializeToString())
        client.socket.settimeout(60)
        for number in range(60):
            client.socket.sendall(b"\0\0\x08\x06\0\0\0\0\0" + struct.pack(">Q", number))
            time.sleep(0.02)
        while client.ended < 1:
            assert client.read()
        assert client.streams[1].status == 0
        client.close()
        idle = FrameClient(one.data, time.monotonic)  # and with no call at all
        for number in range(60):
            idle.socket.sendall(b"\0\0\x08\x06\0\0\0\0\0" + struct.pack(">Q", number))
            time.sleep(0.01)
        idle.start("/whippet.v1.ModelService/ListModels", b"")
        idle.socket.settimeout(60)
        while idle.ended < 1:
            assert idle.read()
        assert idle.streams[1].status == 0
        idle.close()


def test_a_port_that_is_taken_is_an_error(template: Template, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flag in ("listen", "admin-listen", "health-listen", "metrics-listen"):
            done = template.run(all_flags(f"--{flag}={address}"), tmp_path)
            assert done.returncode == 4
            lines = [line for line in done.stderr.splitlines() if line.startswith("whippet:")]
            assert len(lines) == 1
            assert address in lines[0]


@pytest.mark.proof
@pytest.mark.parametrize("setting", ["listen", "admin-listen", "health-listen", "metrics-listen"])
@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])  # nobody's name, nobody's address
def test_a_host_that_is_none_of_ours_is_a_wrong_setting(
    template: Template, tmp_path: Path, setting: str, host: str
) -> None:
    done = template.run(all_flags(f"--{setting}={host}:0"), tmp_path)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("whippet:")]
    assert setting in line
    assert host in line


def test_two_servers_cannot_share_a_port(template: Template, server: Server, tmp_path: Path) -> None:
    assert template.run(all_flags(f"--listen={server.data}"), tmp_path).returncode == 4
