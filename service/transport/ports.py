"""Opens a port with its credentials, for this process alone or for several."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from service.config.settings import BadSettings
from service.transport.call.http2 import PortBounds, bind, options
from service.transport.call.inbox import SMALL
from service.transport.port.closing import Gate, Stoppable
from service.transport.port.tls import Certificates
from service.transport.process.descriptors import SIDE_PORT
from service.transport.relays.relays import RelayCounts, RelayOptions, Relays


class PortTaken(Exception):
    """An address cannot be listened on. One line."""


SIDE_BOUNDS = PortBounds(SIDE_PORT, 64, SMALL.message_bytes)  # of a port that is not for callers


class Server(Stoppable, Protocol):
    async def start(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Port:
    server: Server
    address: str  # with the real port where the setting was 0
    gate: Gate

    @property
    def number(self) -> int:
        return int(self.address.rpartition(":")[2])

    def leave(self) -> asyncio.Task[None]:
        return self.gate.leave(self.server)

    async def close(self, grace: float) -> None:
        await self.gate.close(self.server, grace)


def open_port(
    setting: str,
    address: str,
    handlers: Sequence[grpc.GenericRpcHandler[bytes, bytes]],
    credentials: grpc.ServerCredentials | None,
    bounds: PortBounds,
) -> Port:
    """Returns a port that is bound but not started. Raises PortTaken, or BadSettings, which names `setting`."""
    gate = Gate(handlers)
    server = grpc.aio.server(options=options(bounds, shared=False))
    server.add_generic_rpc_handlers((gate,))
    port = bind(server, address, credentials)
    if port == 0:
        raise cannot_listen(setting, address)
    return Port(server, _with_port(address, port), gate)


def open_shared_port(
    setting: str,
    address: str,
    handlers: Sequence[grpc.GenericRpcHandler[bytes, bytes]],
    certificates: Certificates | None,
    bounds: PortBounds,
    relays: RelayOptions,
    counts: RelayCounts,
) -> Port:
    """Relays listen on the port; the last of the handlers must know every method."""
    reserved, port = _reserve(setting, address)
    gate = Gate(handlers)
    address = _with_port(address, port)
    server = Relays(relays, address, bounds, gate, certificates, counts, reserved)
    return Port(server, address, gate)


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


def _reserve(setting: str, address: str) -> tuple[list[socket.socket], int]:
    """Returns sockets that hold the address for processes of this user to listen there together, and its port. A server
    that listens there already is an error. Raises PortTaken or BadSettings."""
    port, reserved = int(address.rpartition(":")[2]), list[socket.socket]()
    for family, where in _resolved(setting, address):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are ending are no server
                alone.bind((where[0], port, *where[2:]))
            one = socket.socket(family, socket.SOCK_STREAM)
            reserved.append(one)
            _bind_shared(one, (where[0], port, *where[2:]))
            port = one.getsockname()[1]
        except OSError as error:
            if error.errno == errno.EADDRINUSE or not reserved:  # a name may have an address that is not to be had
                for one in reserved:
                    one.close()
                raise cannot_listen(setting, address) from None
    return reserved, port


def _bind_shared(one: socket.socket, where: Any) -> None:
    """SO_REUSEADDR is set only where a former server's connections are in TIME_WAIT: it would let another server
    reserve the port too until the relays listen."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        one.bind(where)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(where)


def _resolved(setting: str, address: str) -> list[tuple[socket.AddressFamily, Any]]:
    """Families and socket addresses. Raises BadSettings."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise BadSettings(f"{setting}: the host of {address} cannot be resolved: {error.strerror}") from None
    return [(family, where) for family, _, _, _, where in found]


def cannot_listen(setting: str, address: str) -> PortTaken | BadSettings:
    """Tries the bind again with a socket, since gRPC does not report why it failed."""
    try:
        for family, where in _resolved(setting, address):
            try:
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    probe.bind(where)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    return BadSettings(f"{setting}: {address} cannot be listened on: {error.strerror}")
    except BadSettings as unresolved:
        return unresolved
    return PortTaken(f"{address}: cannot listen there; is another server running?")
