"""A port: bound, with its credentials, and how HTTP/2 is set up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_reflection.v1alpha import reflection

from service.config.settings import BadSettings, TlsOptions
from service.transport.closing import Gate
from service.transport.rpc import MAX_MESSAGE_BYTES

_OPTIONS: tuple[tuple[str, int], ...] = (
    # Clients may ping while they wait for a token.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Detects a client whose machine went away without closing the connection.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a port that is taken is an error
)


class PortTaken(Exception):
    """An address cannot be listened on. One line."""


@dataclass(frozen=True, slots=True)
class Port:
    """A server and where it listens."""

    server: grpc.aio.Server
    address: str  # with the real port where the setting said 0


def open_port(
    address: str,
    handlers: Sequence[grpc.GenericRpcHandler[bytes, bytes]],
    names: Sequence[str],
    credentials: grpc.ServerCredentials | None,
    gate: Gate,
) -> Port:
    """A server that is bound and not yet started. `names` are what reflection lists. Raises PortTaken."""
    server = grpc.aio.server(options=_OPTIONS, interceptors=(gate,))
    server.add_generic_rpc_handlers(tuple(handlers))
    if names:
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise PortTaken(f"{address}: cannot listen there; is another server running?")
    return Port(server, f"{address.rpartition(':')[0]}:{port}")


def credentials_of(tls: TlsOptions) -> grpc.ServerCredentials | None:
    """None for plaintext. Raises BadSettings."""
    if tls.cert is None or tls.key is None:
        return None
    pair = (_pem(tls.key, "tls.key"), _pem(tls.cert, "tls.cert"))
    ca = None if tls.client_ca is None else _pem(tls.client_ca, "tls.client-ca")
    return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)


def _pem(path: Path, name: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadSettings(f"{name}: {path} cannot be read: {error.strerror}") from None
    if b"-----BEGIN " not in data:
        raise BadSettings(f"{name}: {path} is not PEM")
    return data
