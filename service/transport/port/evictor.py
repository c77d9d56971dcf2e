"""Evicts idle connections where a gRPC port of this process has more than its bound.

At its limit gRPC can only refuse the newest connection, so that silent ones would block the port. So it is allowed more
(`http2.PortBounds.spare`), and a thread, which no flood delays, shuts down the sockets that `surplus` chooses: to gRPC,
the client has disconnected. An unfinished handshake counts as idle.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from service.transport.call.busy import BusyPeers
from service.transport.call.http2 import PortBounds
from service.transport.port.surplus import Host, surplus

_EVERY = 0.1  # seconds between two polls
_EVERY_CROWDED = 0.01  # seconds between two polls, after one that evicted
_SETTLED = 0.25  # seconds of idleness before which a connection is evicted only where half of the spare is used up
_LONGEST = 5.0  # seconds after which a poll lists the descriptors, however few are open
_LOG_EVERY = 60.0  # seconds between two log lines about one port
_FDS = "/proc/self/fd"
# For SO_LINGER: the socket is reset when it is closed, and leaves no TIME_WAIT and no half-closed connection behind.
_RESET = struct.pack("ii", 1, 0)
_log = logging.getLogger(__name__)

Inode = int


@dataclass(slots=True)
class Connection:
    """An accepted connection, as surplus.Held."""

    fd: int
    inode: Inode
    port: int
    peer: str  # as gRPC names it
    host: Host
    accepted: float  # when a poll first found the socket; seconds, the evictor's clock
    idle_since: float | None = None


@dataclass(slots=True)
class _BoundedPort:
    bound: int
    spare: int  # connections beyond the bound that gRPC still accepts
    busy: BusyPeers
    evicted: int = 0  # connections, since the last log line
    logged: float = -_LOG_EVERY
    connections: list[Connection] = field(default_factory=list)


class Evictor:
    """Tests call `look` instead of `start`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failure_logged = -_LOG_EVERY
        self._ports: dict[int, _BoundedPort] = {}
        self._known: dict[Inode, Connection] = {}
        self._others: set[Inode] = set()  # sockets that are no connection of a bounded port
        self._looked = -_LONGEST
        self._thread: threading.Thread | None = None

    def watch(self, port: int, bounds: PortBounds, busy: BusyPeers) -> None:
        self._ports = {**self._ports, port: _BoundedPort(bounds.connections, bounds.spare, busy)}
        self._others = set()

    def start(self) -> None:
        """Polls until the process ends. Further calls do nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="evictor", daemon=True)
            self._thread.start()

    def look(self) -> int:
        """Returns how many connections were evicted."""
        now = self._clock()
        least = min((one.bound for one in self._ports.values()), default=0)
        if now - self._looked < _LONGEST and 0 < _descriptors() <= least:
            return 0  # fewer descriptors of all kinds than any port may have connections
        self._looked = now
        self._find(now)
        return sum(self._relieve(number, bounded, now) for number, bounded in self._ports.items())

    def _run(self) -> None:
        while True:
            try:
                evicted = self.look()
            except Exception:
                evicted = 0
                self._log_failure()
            time.sleep(_EVERY_CROWDED if evicted else _EVERY)

    def _log_failure(self) -> None:
        now = self._clock()
        if now - self._failure_logged >= _LOG_EVERY:
            self._failure_logged = now
            _log.exception("connections could not be looked at")

    def _find(self, now: float) -> None:
        for bounded in self._ports.values():
            bounded.connections = []
        known, others = {}, set()
        for fd, inode in _sockets():
            if inode in self._others:
                others.add(inode)
                continue
            one = self._known.get(inode)
            if one is None:
                ends = _ends(fd)
                if ends is None:
                    continue  # the socket is not connected yet, or not any more
                port, peer, host = ends
                if port not in self._ports:
                    others.add(inode)
                    continue
                one = Connection(fd, inode, port, peer, host, now)
            one.fd = fd
            known[inode] = one
            self._ports[one.port].connections.append(one)
        self._known, self._others = known, others

    def _relieve(self, number: int, bounded: _BoundedPort, now: float) -> int:
        leaving = self._surplus(bounded, now)
        for one in leaving:
            _shut(one)
        bounded.busy.keep({one.peer for one in bounded.connections})
        bounded.evicted += len(leaving)
        if bounded.evicted and now - bounded.logged >= _LOG_EVERY:
            _log.warning("port %d: %d connections without a call were closed for others", number, bounded.evicted)
            bounded.evicted, bounded.logged = 0, now
        return len(leaving)

    def _surplus(self, bounded: _BoundedPort, now: float) -> list[Connection]:
        """Prefers connections idle for _SETTLED seconds: a new one gets that long to make its first call. Where that
        leaves more than half of the spare in use, takes any."""
        idle = [(one, bounded.busy.idle_since(one.peer, one.accepted)) for one in bounded.connections]
        for one, since in idle:
            one.idle_since = None if since is None or now - since < _SETTLED else since
        leaving = surplus(bounded.connections, bounded.bound)
        most = bounded.bound + bounded.spare // 2
        if len(idle) - len(leaving) > most:
            for one, since in idle:
                one.idle_since = since
            leaving = surplus(bounded.connections, most)
        return leaving


def _descriptors() -> int:
    """0 where the kernel (before 6.2) does not report it in one call."""
    return os.stat(_FDS).st_size


def _sockets() -> Iterator[tuple[int, Inode]]:
    for name in os.listdir(_FDS):
        with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
            found = os.fstat(int(name))
            if stat.S_ISSOCK(found.st_mode):
                yield int(name), found.st_ino


def _ends(fd: int) -> tuple[int, str, Host] | None:
    """Returns the local port, and the peer's gRPC name and host. None where the socket is not connected; port 0 where
    it is no internet socket."""
    one = None
    try:
        one = socket.socket(fileno=fd)
        if one.family not in (socket.AF_INET, socket.AF_INET6):
            return 0, "", Host("", local=True)  # a socket never changes its family, so that it is not asked again
        port = one.getsockname()[1]
        address, peer_port, *more = one.getpeername()
        return port, _name(address, peer_port, more[1] if more else 0), Host.of(address)
    except OSError:
        return None
    finally:
        if one is not None:
            one.detach()


def _name(address: str, port: int, scope: int) -> str:
    """Formats an address as grpc.aio.ServicerContext.peer does, to find it in BusyPeers."""
    address = address.partition("%")[0]
    if ":" not in address:
        return f"ipv4:{address}:{port}"
    if address.startswith("::ffff:") and "." in address:
        return f"ipv4:{address[len('::ffff:') :]}:{port}"
    return f"ipv6:%5B{address}{f'%25{scope}' if scope else ''}%5D:{port}"


def _shut(one: Connection) -> None:
    """Works on a duplicate and compares its inode, since gRPC may close the descriptor and the process reuse its
    number."""
    with contextlib.suppress(OSError):  # the connection was closed meanwhile
        fd = os.dup(one.fd)
        with contextlib.closing(socket.socket(fileno=fd)) as own:
            if os.fstat(fd).st_ino == one.inode:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                own.shutdown(socket.SHUT_RDWR)
