"""Closes idle connections of the ports of this process, where a port has more than its bound.

gRPC owns the sockets of its connections. It can refuse the newest one, and nothing else: whoever has opened enough of
them and is silent shuts a port. So gRPC is allowed more connections than the bound (`http2.PortBounds.spare`), and
this thread finds their sockets among the descriptors of the process and shuts down those that `surplus` chooses. gRPC
sees a caller that has hung up. That is below TLS and HTTP/2, so that half a handshake is treated like any other
silence. A thread, since the event loop may be late just when somebody floods a port.
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

from service.transport.busy import BusyPeers
from service.transport.http2 import PortBounds
from service.transport.surplus import Host, surplus

_EVERY = 0.1  # seconds between two looks
_EVERY_CROWDED = 0.01  # seconds, while a port has more than its bound
_SETTLED = 0.25  # seconds without a call, before which a connection goes only where the spare ones are half used up
_LONGEST = 5.0  # seconds without looking at each descriptor, however few there are
_LOG_EVERY = 60.0  # seconds between two lines about one port
_FDS = "/proc/self/fd"
_RESET = struct.pack(
    "ii", 1, 0
)  # of SO_LINGER: what is closed leaves no TIME_WAIT and no half-closed connection behind
_log = logging.getLogger(__name__)

Inode = int


@dataclass(slots=True)
class Connection:
    """An accepted one. Held, as surplus wants it."""

    fd: int
    inode: Inode
    port: int
    peer: str  # as gRPC names it
    host: Host
    accepted: float  # when it was first seen, seconds
    idle_since: float | None = None


@dataclass(slots=True)
class _Watched:
    """One port."""

    bound: int
    spare: int  # beyond which gRPC refuses newcomers
    busy: BusyPeers
    evicted: int = 0  # since the last line about it
    logged: float = -_LOG_EVERY
    connections: list[Connection] = field(default_factory=list)


class Evictor:
    """All ports of this process. Without `start`, looks are taken by hand."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ports: dict[int, _Watched] = {}
        self._known: dict[Inode, Connection] = {}
        self._others: set[Inode] = set()  # sockets that are no connection of a port
        self._looked = -_LONGEST
        self._thread: threading.Thread | None = None

    def watch(self, port: int, bounds: PortBounds, busy: BusyPeers) -> None:
        """Holds a port that this process listens on to its bound, from the next look on."""
        self._ports = {**self._ports, port: _Watched(bounds.connections, bounds.spare, busy)}
        self._others = set()

    def start(self) -> None:
        """Looks from now on, for as long as the process lives."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="evictor", daemon=True)
            self._thread.start()

    def look(self) -> int:
        """Looks once. How many connections were closed."""
        now = self._clock()
        least = min((one.bound for one in self._ports.values()), default=0)
        if now - self._looked < _LONGEST and 0 < _descriptors() <= least:
            return 0  # of all kinds fewer than a port may have
        self._looked = now
        self._find(now)
        return sum(self._relieve(number, watched, now) for number, watched in self._ports.items())

    def _run(self) -> None:
        while True:
            try:
                evicted = self.look()
            except Exception:
                evicted = 0
                _log.exception("connections could not be looked at")
            time.sleep(_EVERY_CROWDED if evicted else _EVERY)

    def _find(self, now: float) -> None:
        """Which connections each port has now."""
        for watched in self._ports.values():
            watched.connections = []
        known, others = {}, set()
        for fd, inode in _sockets():
            if inode in self._others:
                others.add(inode)
                continue
            one = self._known.get(inode)
            if one is None:
                ends = _ends(fd)
                if ends is None:
                    continue  # neither end is known yet, or not any more
                port, peer, host = ends
                if port not in self._ports:
                    others.add(inode)
                    continue
                one = Connection(fd, inode, port, peer, host, now)
            one.fd = fd
            known[inode] = one
            self._ports[one.port].connections.append(one)
        self._known, self._others = known, others

    def _relieve(self, number: int, watched: _Watched, now: float) -> int:
        leaving = self._surplus(watched, now)
        for one in leaving:
            _shut(one)
        watched.busy.keep({one.peer for one in watched.connections})
        watched.evicted += len(leaving)
        if watched.evicted and now - watched.logged >= _LOG_EVERY:
            _log.warning("port %d: %d connections without a call were closed for others", number, watched.evicted)
            watched.evicted, watched.logged = 0, now
        return len(leaving)

    def _surplus(self, watched: _Watched, now: float) -> list[Connection]:
        """First of those that have been idle for a while, so that a newcomer has time to call. It also bounds how often
        somebody can connect anew whose connections are closed."""
        idle = [(one, watched.busy.idle_since(one.peer, one.accepted)) for one in watched.connections]
        for one, since in idle:
            one.idle_since = None if since is None or now - since < _SETTLED else since
        leaving = surplus(watched.connections, watched.bound)
        most = watched.bound + watched.spare // 2
        if len(idle) - len(leaving) > most:
            for one, since in idle:
                one.idle_since = since
            leaving = surplus(watched.connections, most)
        return leaving


def _descriptors() -> int:
    """How many are open; 0 where the kernel (before 6.2) does not say it in one call."""
    return os.stat(_FDS).st_size


def _sockets() -> Iterator[tuple[int, Inode]]:
    for name in os.listdir(_FDS):
        with contextlib.suppress(OSError):  # closed meanwhile
            found = os.fstat(int(name))
            if stat.S_ISSOCK(found.st_mode):
                yield int(name), found.st_ino


def _ends(fd: int) -> tuple[int, str, Host] | None:
    """Port of our end; gRPC's name and the address of the other one. A socket without two such ends is None."""
    one = None
    try:
        one = socket.socket(fileno=fd)
        if one.family not in (socket.AF_INET, socket.AF_INET6):
            return 0, "", Host("", local=True)  # for good
        port = one.getsockname()[1]
        address, peer_port, *more = one.getpeername()
        return port, _name(address, peer_port, more[1] if more else 0), Host.of(address)
    except OSError:
        return None
    finally:
        if one is not None:
            one.detach()


def _name(address: str, port: int, scope: int) -> str:
    """As grpc.aio.ServicerContext.peer."""
    address = address.partition("%")[0]
    if ":" not in address:
        return f"ipv4:{address}:{port}"
    if address.startswith("::ffff:") and "." in address:
        return f"ipv4:{address[len('::ffff:') :]}:{port}"
    return f"ipv6:%5B{address}{f'%25{scope}' if scope else ''}%5D:{port}"


def _shut(one: Connection) -> None:
    """By a descriptor of our own, which cannot become another's, once it is known whose it is."""
    with contextlib.suppress(OSError):  # it has gone meanwhile
        fd = os.dup(one.fd)
        with contextlib.closing(socket.socket(fileno=fd)) as own:
            if os.fstat(fd).st_ino == one.inode:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                own.shutdown(socket.SHUT_RDWR)
