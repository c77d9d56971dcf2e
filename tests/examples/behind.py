"""What tests of the two balancers share: servers with an engine without weights, and certificates."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
from cryptography import x509

from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1.generation_pb2_grpc import GenerationServiceStub
from tests.envoy import Backend
from tests.service.certificates import Authority, write_pair
from tests.service.conftest import Server, ask_stream

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
PATIENCE = 90.0  # seconds after which something hangs, on however slow a machine
NAME = "whippet.example"  # of the servers, in the examples


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def backend(server: Server) -> Backend:
    return Backend(port(server.data), port(server.health))


def kill(server: Server) -> None:
    """Without a word to anybody."""
    engine = server.engine_pid()
    server.process.kill()
    server.process.wait(PATIENCE)
    with contextlib.suppress(ProcessLookupError):
        os.kill(engine, signal.SIGKILL)


def working(server: Server) -> int:
    """Requests that it has."""
    return int(server.load().live_requests)


def asked(text: str, tokens: int) -> pb.GenerateStreamRequest:
    """A stream whose tokens can be counted."""
    return ask_stream(text, tokens, output=pb.OutputOptions(token_ids=True))


@contextlib.contextmanager
def client(address: str, credentials: grpc.ChannelCredentials | None = None) -> Iterator[GenerationServiceStub]:
    """Tries nothing again by itself."""
    options = (("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1))
    if credentials is None:
        made = grpc.insecure_channel(address, options)
    else:
        made = grpc.secure_channel(address, credentials, (*options, ("grpc.ssl_target_name_override", NAME)))
    with made as channel:
        yield GenerationServiceStub(channel)


def ended(future: grpc.Future[pb.GenerateResponse]) -> str:  # type: ignore[type-arg]  # has parameters in stubs alone
    """`whole`, or how a call failed."""
    try:
        future.result(PATIENCE)
    except grpc.RpcError as error:
        return f"{error.code()}: {error.details()}"
    return "whole"


def certificates(folder: Path) -> grpc.ChannelCredentials:
    """Writes `tls.crt`, `tls.key` and `ca.crt`, for servers and balancer both; what a client needs to trust them."""
    folder.mkdir()
    authority = Authority("ca")
    write_pair(folder, "pair", authority.sign(x509.DNSName(NAME)))
    (folder / "pair.pem").rename(folder / "tls.crt")
    (folder / "pair.key").rename(folder / "tls.key")
    (folder / "ca.crt").write_bytes(authority.pem)
    return grpc.ssl_channel_credentials(authority.pem)


def with_tls(text: str, folder: Path, where: str) -> str:
    """An example with the lines that TLS needs, and its files in another folder."""
    return text.replace("#+", "").replace(where, str(folder))
