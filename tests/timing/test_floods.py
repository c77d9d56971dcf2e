"""What strangers can do to a server: memory is bounded, health answers, and a stream beside them loses nothing."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from threading import Event, Thread

import grpc
import pytest

from bench.floods import GENERATE, HEALTH, REFLECTION, Prober, cut_message, flood, silent
from service.pb.whippet.v1 import admin_pb2
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.conftest import Server, ask, ask_stream, refused

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
TOKEN = (("authorization", "Bearer sesame"),)
_PACKED = gzip.compress(bytes(60_000_000))
BOMB = b"\1" + struct.pack(">I", len(_PACKED)) + _PACKED


@pytest.fixture(scope="module", params=[False, True], ids=["without tokens", "with tokens"])
def guarded(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def attacked(guarded: bool, serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Slow enough that a stream lasts; of the attackers nobody has a token."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    digest = hashlib.sha256(b"sesame").hexdigest()
    tokens.write_text(f'[{{tenant: a, sha256: "{digest}", rights: [generate, admin]}}]\n')
    flags = [f"--auth.tokens-file={tokens}"] if guarded else []
    with serve("--fake.step-time=0.01", "--log-level=warning", *flags) as one:
        yield one
        log = one.log.read_text()
        assert "Traceback" not in log
        assert len(log) < 5000


def test_floods(attacked: Server) -> None:
    """One after the other, a second each: calls that are reset as soon as they have begun, calls without a message,
    messages that do not come whole, on methods with and without a token, and messages that unpack to a thousand times
    their size. Growth is what the bounds in docs/operations/limits.md add up to for twenty connections."""
    begun: list[int] = []

    def attack() -> None:
        for flood_of in (
            {"connections": 2, "reset": True},
            {"connections": 20, "most": 50_000},
            {"connections": 20, "most": 5_000, "body": cut_message(60_000)},
            {"connections": 10, "most": 5_000, "body": cut_message(60_000), "path": REFLECTION},
            {"connections": 10, "most": 5_000, "body": cut_message(60_000), "path": HEALTH},
            {"connections": 5, "most": 50, "body": BOMB, "metadata": (("grpc-encoding", "gzip"), *TOKEN)},
        ):
            begun.append(flood(attacked.data, 1.0, **flood_of))  # type: ignore[arg-type]

    before = attacked.rss()
    stream = attacked.generation.GenerateStream(ask_stream("beside", 600), metadata=TOKEN, timeout=120)
    with Prober(attacked.health, attacked.process.pid) as prober:
        thread = Thread(target=attack)
        thread.start()
        *_, last = stream
        thread.join()
    assert last.finish.usage.completion_tokens == 600
    assert begun[0] > 2_000, begun
    assert prober.peak - before < 300_000_000
    # Tens of milliseconds where nothing else runs; the attacker and other tests share two cores with the server.
    assert prober.worst < 1.0


def test_compressed_messages_are_refused(attacked: Server) -> None:
    zipped = grpc.Compression.Gzip
    refusal = refused(attacked.generation.Generate, ask("x" * 2000, 1), metadata=TOKEN, compression=zipped)
    assert refusal.code is grpc.StatusCode.UNIMPLEMENTED


def test_a_token_is_looked_at_before_the_message(attacked: Server, guarded: bool) -> None:
    """A call whose message never comes is refused at once, where its token is none."""
    never = Event()
    call = attacked.channel.stream_unary(GENERATE).future(iter(never.wait, None), timeout=60)
    if guarded:
        assert call.code() is grpc.StatusCode.UNAUTHENTICATED
    call.cancel()
    never.set()


def test_two_messages_or_none_are_no_request(attacked: Server) -> None:
    """A method of one message: without one it is INVALID_ARGUMENT, and what follows the first is not looked at."""
    call = attacked.channel.stream_unary(GENERATE)
    assert refused(call, iter(()), metadata=TOKEN).code is grpc.StatusCode.INVALID_ARGUMENT
    one = ask("x", 2).SerializeToString()
    assert pb.GenerateResponse.FromString(call(iter((one, one)), metadata=TOKEN, timeout=60)).text


@pytest.mark.parametrize(("port", "count"), [("data", 1_100), ("metrics", 200)])
def test_silent_connections_shut_nobody_out(serve: Serve, many_files: None, port: str, count: int) -> None:
    """At 1,100 more of them than a process commonly has descriptors. On their own port they are gone after five
    seconds, on the metrics port at once."""
    with serve("--log-level=warning") as one, silent(getattr(one, port), count):
        for other in {"data", "admin_address", "health"} - {port}:
            with grpc.insecure_channel(getattr(one, other)) as channel:
                grpc.channel_ready_future(channel).result(60)
        assert scrape(one.metrics).startswith(b"HTTP/1.1 200"), "the oldest silent ones go"
        os.kill(one.engine_pid(), signal.SIGKILL)
        one.until(lambda load: load.restarts == 1 and load.state == admin_pb2.ENGINE_STATE_READY)
        with grpc.insecure_channel(one.data) as channel:
            grpc.channel_ready_future(channel).result(60)


@pytest.fixture
def many_files() -> Iterator[None]:
    """The attacker needs more descriptors than the server has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def scrape(address: str) -> bytes:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as link:
        link.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        return link.recv(4096)
