"""Callers that do harm: floods and silence over raw sockets; and a probe of the server's health meanwhile."""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import grpc
import hpack
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.grpc_frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
HEALTH = "/grpc.health.v1.Health/Check"
GENERATE = "/whippet.v1.GenerationService/Generate"
_FRAME = 1 << 14  # bytes in a DATA frame
_AT_ONCE = 50  # calls between two looks at the clock
_SLOW = 1.0  # seconds that a server may leave a socket full


Metadata = tuple[tuple[str | bytes, str | bytes], ...]


class Rogue:
    def __init__(self, address: str, path: str | bytes = GENERATE, metadata: Metadata = ()) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), _SLOW)
        try:
            self.socket.sendall(
                PREFACE + frame(SETTINGS, 0, 0, b"") + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30))
            )
        except OSError:  # a server that takes no more connections
            self.socket.close()
            raise
        self.calls = 0
        headers: list[tuple[str | bytes, str | bytes]] = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", address),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *metadata,
        ]
        encoder = hpack.Encoder()
        self._first, self._again = encoder.encode(headers), encoder.encode(headers)
        self._drainer = threading.Thread(target=self._drain, daemon=True)
        self._drainer.start()

    def call(self, body: bytes = b"", *, reset: bool = False, ended: bool = False) -> bytes:
        """Returns the frames of a further call: its headers, some bytes that do not end it unless `ended`, and a
        reset."""
        stream = 2 * self.calls + 1
        frames = [frame(HEADERS, END_HEADERS, stream, self._again if self.calls else self._first)]
        frames += [frame(DATA, 0, stream, body[at : at + _FRAME]) for at in range(0, len(body), _FRAME)]
        if ended:
            frames.append(frame(DATA, END_STREAM, stream, b""))
        if reset:
            frames.append(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))
        self.calls += 1
        return b"".join(frames)

    def _drain(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.settimeout(None)
            while self.socket.recv(1 << 16):
                pass

    def finish(self) -> None:
        """Sends no more, and waits until the server is silent."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        self._drainer.join(20)
        self.socket.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def flood(
    address: str,
    seconds: float,
    *,
    connections: int,
    body: bytes = b"",
    reset: bool = False,
    most: int = 1_000_000,
    path: str = GENERATE,
    metadata: Metadata = (),
) -> int:
    """Begins calls on every connection in turn, for so long, and `most` of them at most. A connection that the server
    closes is opened again. Returns how many were begun; those that were not reset stay open until the end."""
    rogues: list[Rogue] = []
    begun, end = 0, time.monotonic() + seconds
    try:
        while time.monotonic() < end and begun < most:
            if len(rogues) < connections:
                with contextlib.suppress(OSError):
                    rogues.append(Rogue(address, path, metadata))
            for rogue in tuple(rogues):
                try:
                    rogue.socket.sendall(b"".join(rogue.call(body, reset=reset) for _ in range(_AT_ONCE)))
                    begun += _AT_ONCE
                except OSError:
                    rogue.close()
                    rogues.remove(rogue)
        while time.monotonic() < end:
            time.sleep(0.05)
    finally:
        for rogue in rogues:
            rogue.close()
    return begun


def cut_message(size: int, declared: int = 4_000_000) -> bytes:
    """Returns the first `size` bytes of a message whose declared length is `declared`."""
    return b"\0" + struct.pack(">I", declared) + b"\x1a" + b"x" * (size - 6)


@contextlib.contextmanager
def silent(address: str, count: int) -> Iterator[int]:
    """Opens silent connections; yields how many were accepted."""
    host, _, port = address.rpartition(":")
    sockets = []
    try:
        for _ in range(count):
            with contextlib.suppress(OSError):
                sockets.append(socket.create_connection((host, int(port)), _SLOW))
        yield len(sockets)
    finally:
        for one in sockets:
            one.close()


def crowded(number: int, entry: bytes, size: int) -> bytes:
    """Returns a field that has a length, of about `size` bytes, full of the same entry."""
    content = entry * (size // len(entry))
    left, prefix = len(content), bytearray([number << 3 | 2])
    while left >= 0x80:
        prefix.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes(prefix) + bytes([left]) + content


NOTHING = b""
HALF_A_PREFACE = PREFACE[:9]
HTTP2 = PREFACE + frame(SETTINGS, 0, 0, b"") + frame(SETTINGS, ACK, 0, b"")
HALF_A_HANDSHAKE = bytes.fromhex("16030100ff010000fb0303")  # the start of a TLS ClientHello
_CONNECT = 2.0  # seconds to connect
_POLL = 0.005  # seconds between polls


class IdleConnections:
    """Holds `count` idle connections to one port, from a thread, for the length of a `with` block."""

    def __init__(
        self, address: str, count: int, output: bytes, *, tls: bool = False, source: str = "127.0.0.1"
    ) -> None:
        """Sends `output` on each connection and then nothing more. With `tls`, each connection completes a TLS
        handshake first. `source` is the local address that the connections come from."""
        host, _, port = address.rpartition(":")
        self._to = host, int(port)
        self._count = count
        self._first_bytes = output
        self._source = source
        self._tls = _trusting() if tls else None
        self._sockets: dict[int, socket.socket] = {}
        self._poll = select.epoll()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.opened = 0  # connections since the start, reopened ones included

    def __enter__(self) -> IdleConnections:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(20)
        for one in self._sockets.values():
            one.close()
        self._poll.close()

    def wait(self) -> None:
        """Blocks until `count` connections were opened."""
        while self.opened < self._count:
            time.sleep(_POLL)

    def _run(self) -> None:
        while not self._stop.is_set():
            while len(self._sockets) < self._count and not self._stop.is_set():
                self._open()
            for number, _ in self._poll.poll(_POLL):
                self._hear(number)

    def _open(self) -> None:
        try:
            one = socket.create_connection(self._to, _CONNECT, (self._source, 0))
            if self._tls is not None:
                one = self._tls.wrap_socket(one)
            one.sendall(self._first_bytes)
        except OSError:
            return
        one.setblocking(False)
        self._sockets[one.fileno()] = one
        self._poll.register(one.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
        self.opened += 1

    def _hear(self, number: int) -> None:
        """Discards the bytes that arrived, and drops a connection that the server has closed."""
        one = self._sockets[number]
        try:
            if one.recv(65_536):
                return
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError:
            pass
        self._poll.unregister(number)
        one.close()
        del self._sockets[number]


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


_EVERY = 0.02  # seconds
_PATIENCE = 30.0  # seconds until a probe has failed


def rss(pid: int) -> int:
    """Returns the resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def addresses(log: Path, process: subprocess.Popen[bytes]) -> dict[str, str]:
    """Returns the addresses of a server's four ports, once its log reports readiness."""
    while process.poll() is None:
        output = log.read_text()
        ready = re.search(r"^ready: data (\S+) admin (\S+) health (\S+)", output, re.MULTILINE)
        metrics = re.search(r" metrics http://(\S+)/metrics$", output, re.MULTILINE)
        if ready and metrics:
            return {"data": ready[1], "admin": ready[2], "health": ready[3], "metrics": metrics[1]}
        time.sleep(_EVERY)
    raise RuntimeError(f"the server did not start:\n{log.read_text()}")


class Prober:
    """Asks again and again, from a thread of its own, within a `with` block."""

    def __init__(self, health: str, pid: int) -> None:
        self._health = health
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.waits: list[float] = []  # seconds, of each probe
        self.slowest = 0.0  # on the monotonic clock, when the longest of them began
        self.peak = 0  # bytes

    def __enter__(self) -> Prober:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(_PATIENCE)

    @property
    def worst(self) -> float:
        """Returns the longest probe in seconds."""
        return max(self.waits, default=_PATIENCE)

    def _run(self) -> None:
        with grpc.insecure_channel(self._health) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            while not self._stop.wait(_EVERY):
                began = time.monotonic()
                try:
                    check(health_pb2.HealthCheckRequest(), timeout=_PATIENCE, wait_for_ready=True)
                except grpc.RpcError:
                    wait = _PATIENCE
                else:
                    wait = time.monotonic() - began
                if wait > max(self.waits, default=0.0):
                    self.slowest = began
                self.waits.append(wait)
                self.peak = max(self.peak, rss(self._pid))
