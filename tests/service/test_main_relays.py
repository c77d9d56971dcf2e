"""A server whose data port several processes share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from bench.floods import GENERATE, Rogue
from bench.grpc_frames import ACK, PREFACE, SETTINGS, frame
from bench.redis_server import free_port
from service.pb.whippet.v1 import generation_pb2_grpc
from tests.service.conftest import PATIENCE, STEP, Server, ask, ask_stream
from tests.service.scraped import page_of
from tests.waiting import reaped, until, wait_for

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
OWN = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own
RELAYS = 3


@contextlib.contextmanager
def shared(serve: Serve, *flags: str) -> Iterator[Server]:
    with serve(f"--server.fronts={RELAYS}", f"--fake.step-time={STEP}", *flags) as server:
        assert len(server.relay_pids()) == RELAYS
        yield server


@contextlib.contextmanager
def stubs(server: Server, count: int) -> Iterator[list[Any]]:
    """Of so many connections, which the kernel shares out."""
    with contextlib.ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(server.data, options=OWN)) for _ in range(count)]
        yield [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_answers_limits_and_counts_are_those_of_one_server(serve: Serve) -> None:
    """Whichever process has a caller's connection: one name may be live once, and the counts add up."""
    with shared(serve, "--optimizations.response-cache=true") as server, stubs(server, 12) as every:
        texts = {stub.Generate(ask("the same", 5), timeout=PATIENCE).text for stub in every}
        assert len(texts) == 1
        one = every[0].GenerateStream(ask_stream("long", 4000, request_id="mine"), timeout=PATIENCE)
        next(one)
        for stub in every[1:]:
            with pytest.raises(grpc.RpcError) as refused:
                stub.Generate(ask("other", 5, request_id="mine"), timeout=PATIENCE)
            assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
        one.cancel()
        server.idle()
        page = page_of(server)
        generate = ("method", "whippet.v1.GenerationService/Generate")
        assert page["whippet_requests_total", (("code", "OK"), generate)] == 12
        assert page["whippet_requests_total", (("code", "ALREADY_EXISTS"), generate)] == 11
        assert page["whippet_relays", ()] == RELAYS
        assert page["whippet_relay_deaths_total", ()] == 0
        own, *relays = [oom_score(pid) for pid in (server.process.pid, *server.relay_pids())]
        assert relays == [min(1000, own + 200)] * RELAYS  # the kernel takes them first


@pytest.mark.parametrize("everybody", [False, True])
def test_live_streams_end_before_the_server_does(serve: Serve, everybody: bool) -> None:
    """Whether the front alone is told to end, or each of its processes, as a service manager does it."""
    with shared(serve, "--drain.timeout=60", "--scheduler.max-sequences=16") as server, stubs(server, 8) as every:
        relays = server.relay_pids()
        calls = [stub.GenerateStream(ask_stream(f"{n}", 400), timeout=PATIENCE) for n, stub in enumerate(every)]
        for call in calls:
            next(call)
        for pid in relays if everybody else ():
            os.kill(pid, signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        for call in calls:
            last = list(call)[-1]
            assert last.HasField("finish")
            assert call.code() is grpc.StatusCode.OK
        assert server.process.wait(PATIENCE) == 0
        assert all(map(reaped, relays))


def test_relays_do_not_outlive_a_front_that_was_killed(serve: Serve) -> None:
    with shared(serve) as server, stubs(server, 4) as every:
        relays = server.relay_pids()
        calls = [stub.GenerateStream(ask_stream("long", 4000), timeout=PATIENCE) for stub in every]
        for call in calls:
            next(call)
        server.process.kill()
        for call in calls:
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code() is grpc.StatusCode.UNAVAILABLE
        wait_for(lambda: all(map(reaped, relays)))


@pytest.mark.proof
def test_relays_end_while_their_front_hangs_and_are_there_again_once_it_runs(serve: Serve) -> None:
    """Callers see their connections break, and may go elsewhere."""
    with shared(serve, "--server.hang-timeout=3") as server, stubs(server, 4) as every:
        relays = server.relay_pids()
        calls = [stub.GenerateStream(ask_stream("long", 4000), timeout=2 * PATIENCE) for stub in every]
        for call in calls:
            next(call)
        os.kill(server.process.pid, signal.SIGSTOP)
        for call in calls:
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code() is grpc.StatusCode.UNAVAILABLE
        wait_for(lambda: all(map(ended, relays)))
        os.kill(server.process.pid, signal.SIGCONT)
        wait_for(lambda: len(set(server.relay_pids()) - set(relays)) == RELAYS)
        assert server.generation.Generate(ask("again", 2), timeout=PATIENCE, wait_for_ready=True).text
        assert "the front gave no sign of life for 3 s" in server.log.read_text()


def ended(pid: int) -> bool:
    """Also where its parent, which is stopped, has not taken note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_relay_that_hangs_does_not_keep_a_server_from_ending(serve: Serve) -> None:
    with shared(serve) as server:
        hung = server.relay_pids()[0]
        os.kill(hung, signal.SIGSTOP)
        assert server.stop() == 0
        assert reaped(hung)
        assert "a relay does not end by itself" in server.log.read_text()


def test_a_relay_logs_as_the_server_does(serve: Serve) -> None:
    """What gRPC says there of a caller's bytes, too: that there were such, in a line of JSON."""
    with shared(serve, "--log.format=json") as server:
        rogue = Rogue(server.data, GENERATE.encode(), ((b"x-token", b"a secret\xff"),))
        rogue.socket.sendall(rogue.call(b"", ended=True))
        said = ['"process": "relay"', '"logger": "access"']
        wait_for(lambda: all(each in server.log.read_text() for each in said))
        rogue.finish()
        log = server.log.read_text()
        lines = [json.loads(line) for line in log[log.index("ready: ") :].splitlines()[1:]]
        assert {"front", "relay"} == {line["process"] for line in lines}
        assert "secret" not in log


async def test_callers_of_a_relay_that_dies_come_back_through_another(serve: Serve) -> None:
    """Under load from many connections: each call of the others ends well, and a caller who tries again is served."""
    with shared(serve, "--scheduler.max-sequences=64") as server:
        victims = server.relay_pids()[:2]
        stop = asyncio.Event()
        codes: list[grpc.StatusCode] = []

        async def caller(number: int) -> None:
            while not stop.is_set():
                async with grpc.aio.insecure_channel(server.data, options=OWN) as channel:
                    stub = generation_pb2_grpc.GenerationServiceStub(channel)
                    call = stub.Generate(ask(f"{number}", 5), timeout=PATIENCE, wait_for_ready=True)
                    codes.append(await call.code())

        callers = [asyncio.create_task(caller(number)) for number in range(16)]
        for victim in victims:
            served = len(codes)
            await until(lambda served=served: len(codes) >= served + 32)
            os.kill(victim, signal.SIGKILL)
            await until(lambda victim=victim: len(server.relay_pids()) == RELAYS and victim not in server.relay_pids())
        served = len(codes)
        await until(lambda: len(codes) >= served + 32)
        stop.set()
        await asyncio.gather(*callers)
        assert {*codes} <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
        assert codes.count(grpc.StatusCode.UNAVAILABLE) <= 2 * 16
        assert codes[-16:].count(grpc.StatusCode.OK) == 16
        await asyncio.to_thread(server.idle)
        await asyncio.to_thread(wait_for, lambda: page_of(server)["whippet_relays", ()] == RELAYS)
        page = await asyncio.to_thread(page_of, server)
        assert page["whippet_relay_deaths_total", ()] == len(victims)
        log = server.log.read_text()
        assert log.count("a relay was ended by SIGKILL; another is started in 1 s") == len(victims)


@pytest.mark.parametrize(("before", "after"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.proof)])
def test_the_number_of_fronts_changes_while_old_connections_are_in_time_wait(
    serve: Serve, before: int, after: int
) -> None:
    """The server closes connections first, so that their TIME_WAIT is on its own port when it starts again."""
    port = free_port()
    with serve(f"--listen=127.0.0.1:{port}", f"--server.fronts={before}") as server, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE)) for _ in range(8)]
        for one in sockets:
            one.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(SETTINGS, ACK, 0, b""))
            assert one.recv(1)
        assert server.stop() == 0
        for one in sockets:
            while one.recv(4096):
                pass  # the server hangs up, and only then does the client
    assert in_time_wait(port) >= 1
    with serve(f"--listen=127.0.0.1:{port}", f"--server.fronts={after}") as server:
        assert server.generation.Generate(ask("again", 2), timeout=PATIENCE).text


def in_time_wait(port: int) -> int:
    """Connections of a server on the port, which has closed them."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return sum(local.endswith(f":{port:04X}") and state == "06" for _, local, _, state, *_ in lines)
