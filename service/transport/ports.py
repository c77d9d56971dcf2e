"""A port: bound, with its credentials, and how HTTP/2 is set up and bounded."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from service.config.settings import BadSettings
from service.transport.closing import Gate
from service.transport.descriptors import SIDE_PORT
from service.transport.inbox import SMALL
from service.transport.rpc import MAX_ANSWER_BYTES

_MOST_PENDING = 4096  # calls of a port that wait to be handed to us; each may hold a first window of 64 KiB
_OPTIONS: tuple[tuple[str, int], ...] = (
    # Clients may ping while they wait for a token.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Detects a client whose machine went away without closing the connection.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    ("grpc.so_reuseport", 0),  # a port that is taken is an error
    # A connection that does not speak, TLS or HTTP/2, is closed.
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.http2.settings_timeout", 5_000),
    # The first window of a call stays as it is: nobody may send more than 64 KiB that was not asked for.
    ("grpc.http2.bdp_probe", 0),
    # Calls are handed to us one after the other, some thousand a second. At most so many wait for it, so that gRPC
    # refuses a flood by itself, and no longer than so many seconds. What is dropped then is cleared away in one go, on
    # our event loop, 20 µs each.
    ("grpc.server.max_pending_requests", _MOST_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING),
    ("grpc.server_max_unrequested_time_in_server", 5),
    # Else calls that have ended count for their connection until the last of them is freed, which a client cannot know:
    # one that always has as many as it may would be refused every other.
    ("grpc.http.overload_protection", 0),
    # 64 KiB of gzip are 64 MiB of zeros, and gRPC looks at the size of a message only once it is unpacked.
    ("grpc.compression_enabled_algorithms_bitset", 1),
)


class PortTaken(Exception):
    """An address cannot be listened on. One line."""


@dataclass(frozen=True, slots=True)
class PortBounds:
    """What the callers of one port may have at once."""

    connections: int
    connection_calls: int  # on one connection at once
    message_bytes: int
    connection_age: float | None = None  # seconds until it is said GOAWAY, some less or more; its calls go on


SIDE_BOUNDS = PortBounds(SIDE_PORT, 64, SMALL.message_bytes)  # of a port that is not for callers


@dataclass(frozen=True, slots=True)
class Port:
    """A server and where it listens."""

    server: grpc.aio.Server
    address: str  # with the real port where the setting said 0
    gate: Gate

    def leave(self) -> asyncio.Task[None]:
        """See Gate.leave."""
        return self.gate.leave(self.server)

    async def close(self, grace: float) -> None:
        """See Gate.close."""
        await self.gate.close(self.server, grace)


def open_port(
    setting: str,
    address: str,
    handlers: Sequence[grpc.GenericRpcHandler[bytes, bytes]],
    credentials: grpc.ServerCredentials | None,
    bounds: PortBounds,
) -> Port:
    """A server that is bound and not yet started. Raises PortTaken, or BadSettings, which names `setting`."""
    options = [
        *_OPTIONS,
        ("grpc.max_allowed_incoming_connections", bounds.connections),
        ("grpc.max_concurrent_streams", bounds.connection_calls),
        ("grpc.max_receive_message_length", bounds.message_bytes),
    ]
    if bounds.connection_age is not None:
        options.append(("grpc.max_connection_age_ms", round(bounds.connection_age * 1000)))
    gate = Gate(handlers)
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((gate,))
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise cannot_listen(setting, address)
    return Port(server, f"{address.rpartition(':')[0]}:{port}", gate)


def cannot_listen(setting: str, address: str) -> PortTaken | BadSettings:
    """Why: gRPC does not say, so it is tried again by hand."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        return BadSettings(f"{setting}: the host of {address} cannot be resolved: {error.strerror}")
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return BadSettings(f"{setting}: {address} cannot be listened on: {error.strerror}")
    return PortTaken(f"{address}: cannot listen there; is another server running?")
