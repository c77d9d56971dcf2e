"""Configures and bounds HTTP/2 on every port. Imports gRPC and nothing of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import grpc

MAX_ANSWER_BYTES = 16 * 1024 * 1024
Options = tuple[tuple[str, int], ...]

_MOST_PENDING = 4096  # calls of a port that wait to be handed to us; each may hold a first window of 64 KiB
_OPTIONS: Options = (
    # Clients may ping while they wait for a token.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Detects a client whose machine went away without closing the connection.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    # A connection that does not speak, TLS or HTTP/2, is closed.
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.http2.settings_timeout", 5_000),
    # The first window of a call stays as it is: no caller may send more than 64 KiB unasked.
    ("grpc.http2.bdp_probe", 0),
    # Calls are handed to us one after the other, some thousand a second. Their number and their wait are bounded, so
    # that gRPC refuses a flood by itself. Dropped calls are cleared at once, on our event loop, 20 µs each.
    ("grpc.server.max_pending_requests", _MOST_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING),
    ("grpc.server_max_unrequested_time_in_server", 5),
    # Else calls that have ended count for their connection until the last of them is freed, which a client cannot know:
    # one that always has as many as it may would be refused every other.
    ("grpc.http.overload_protection", 0),
    # 64 KiB of gzip are 64 MiB of zeros, and gRPC looks at the size of a message only once it is unpacked.
    ("grpc.compression_enabled_algorithms_bitset", 1),
)


@dataclass(frozen=True, slots=True)
class PortBounds:
    connections: int
    connection_calls: int  # on one connection at once
    message_bytes: int
    connection_age: float | None = None  # seconds until it is sent GOAWAY, some less or more; its calls go on
    spare: int = 0  # connections accepted beyond the bound, so that an idle one can be evicted for a new one


class Identification(NamedTuple):
    """A server's key and chain, and the authority of its callers' certificates. All PEM."""

    key: bytes
    chain: bytes
    client_ca: bytes | None


def options(bounds: PortBounds, shared: bool) -> Options:
    """`shared`: several processes listen on the port; otherwise a taken port is an error."""
    found = (
        *_OPTIONS,
        ("grpc.so_reuseport", int(shared)),
        ("grpc.max_allowed_incoming_connections", bounds.connections + bounds.spare),
        ("grpc.max_concurrent_streams", bounds.connection_calls),
        ("grpc.max_receive_message_length", bounds.message_bytes),
    )
    if bounds.connection_age is None:
        return found
    return *found, ("grpc.max_connection_age_ms", round(bounds.connection_age * 1000))


def credentials(current: Callable[[], Identification]) -> grpc.ServerCredentials:
    """Each new connection gets what is current then."""
    identification = current()

    def news() -> grpc.ServerCertificateConfiguration | None:
        nonlocal identification
        if (latest := current()) == identification:
            return None
        identification = latest
        return _configuration(latest)

    first, mutual = _configuration(identification), identification.client_ca is not None
    # gRPC's types do not know that None stands for no news.
    return grpc.dynamic_ssl_server_credentials(first, news, mutual)  # type: ignore[arg-type]


def bind(server: grpc.aio.Server, address: str, identification: grpc.ServerCredentials | None) -> int:
    """Returns the port; 0 where the server cannot listen."""
    try:
        return (
            server.add_insecure_port(address)
            if identification is None
            else server.add_secure_port(address, identification)
        )
    except RuntimeError:
        return 0


def _configuration(identification: Identification) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(identification.key, identification.chain)], identification.client_ca
    )
