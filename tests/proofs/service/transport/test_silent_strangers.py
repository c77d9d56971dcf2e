"""Strangers who open connections and stay silent shut no port: probes are answered, and a stream loses nothing."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.floods import HALF_A_HANDSHAKE, HALF_A_PREFACE, HTTP2, NOTHING, IdleConnections
from tests.service.certificates import HERE, Authority, private_key, write_pair
from tests.service.conftest import Server, ask, ask_stream

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
TOKEN = (("authorization", "Bearer sesame"),)
OWN = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own
SECONDS = 4.0  # of probing
PROBES = 20
LONGEST_GAP = 0.5  # seconds between two messages of a stream beside them
TOKENS = 700  # of the stream beside them, which lasts longer than the probing
ATTACKS = {"admin_address": 70, "health": 70, "data": 600}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("strangers")
    digest = hashlib.sha256(b"sesame").hexdigest()
    (found / "tokens.yaml").write_text(f'[{{tenant: a, sha256: "{digest}", rights: [generate, admin]}}]\n')
    authority = Authority("ca")
    (found / "ca.pem").write_bytes(authority.pem)
    write_pair(found, "server", authority.sign(*HERE, key=private_key()))
    return found


@pytest.fixture(scope="module", params=["no tokens", "tokens", "tokens, two fronts"])
def plain(request: pytest.FixtureRequest, serve: Serve, folder: Path) -> Iterator[Server]:
    flags = [f"--auth.tokens-file={folder / 'tokens.yaml'}"] if "tokens" in request.param.split(",")[0].split() else []
    flags += ["--server.fronts=2"] if "two" in request.param else []
    with serve("--fake.step-time=0.01", "--log-level=warning", *flags) as one:
        yield one


@pytest.fixture(scope="module")
def secured(serve: Serve, folder: Path) -> Iterator[Server]:
    flags = [f"--tls.cert={folder / 'server.pem'}", f"--tls.key={folder / 'server.key'}"]
    with serve("--fake.step-time=0.01", "--log-level=warning", *flags) as one:
        yield one


def channel_to(address: str, authority: bytes | None) -> grpc.Channel:
    if authority is None:
        return grpc.insecure_channel(address, options=OWN)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority), options=OWN)


def probe(address: str, authority: bytes | None) -> str:
    """As a kubelet does it: a connection of its own, and one call that does not wait for the next."""
    with channel_to(address, authority) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError as error:
            return str(error.details())
    return ""


class Reader(Thread):
    """One stream, on a connection that was there before."""

    def __init__(self, server: Server, authority: bytes | None) -> None:
        super().__init__(daemon=True)
        self._channel = channel_to(server.data, authority)
        self._stub = type(server.generation)(self._channel)  # type: ignore[arg-type]
        self._stub.Generate(ask("first", 1), metadata=TOKEN, timeout=60)
        self.tokens = 0
        self.gap = 0.0

    def run(self) -> None:
        stream = self._stub.GenerateStream(ask_stream("beside", TOKENS), metadata=TOKEN, timeout=120)
        last = None
        for message in stream:
            now = time.monotonic()
            if last is not None:
                self.gap = max(self.gap, now - last)
            last = now
            if message.HasField("finish"):
                self.tokens = message.finish.usage.completion_tokens
        self._channel.close()


def attacked(server: Server, port: str, said: bytes, authority: bytes | None = None, *, tls: bool = False) -> None:
    address = getattr(server, port)
    reader = Reader(server, authority)
    reader.start()
    of_port = None if port == "health" else authority
    with IdleConnections(address, ATTACKS[port], said, tls=tls) as strangers:
        strangers.wait()
        failed = []
        for _ in range(PROBES):
            failed.append(probe(address, of_port))
            time.sleep(SECONDS / PROBES)
    reader.join(120)
    assert [one for one in failed if one] == []
    assert reader.tokens == TOKENS
    assert reader.gap <= LONGEST_GAP


@pytest.mark.parametrize(
    ("port", "said"),
    [
        *((port, HTTP2) for port in ATTACKS),
        ("admin_address", NOTHING),
        ("data", HALF_A_PREFACE),
    ],
    ids=[*(f"HTTP/2-{port}" for port in ATTACKS), "nothing-admin_address", "half a preface-data"],
)
def test_no_port_is_shut(plain: Server, port: str, said: bytes) -> None:
    attacked(plain, port, said)


@pytest.mark.parametrize(
    ("port", "said", "tls"),
    [("admin_address", HALF_A_HANDSHAKE, False), ("data", HTTP2, True)],
    ids=["half a handshake-admin_address", "HTTP/2 in TLS-data"],
)
def test_no_port_with_tls_is_shut(secured: Server, folder: Path, port: str, said: bytes, tls: bool) -> None:
    attacked(secured, port, said, (folder / "ca.pem").read_bytes(), tls=tls)
