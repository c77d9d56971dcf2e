"""Holds idle connections open on the loopback, and reopens each one that the server closes."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from types import TracebackType

from bench.grpc_frames import ACK, PREFACE, SETTINGS, frame

NOTHING = b""
HALF_A_PREFACE = PREFACE[:9]
HTTP2 = PREFACE + frame(SETTINGS, 0, 0, b"") + frame(SETTINGS, ACK, 0, b"")
HALF_A_HANDSHAKE = bytes.fromhex("16030100ff010000fb0303")  # the start of a TLS ClientHello
_CONNECT = 2.0  # seconds to connect
_POLL = 0.005  # seconds between polls


class Strangers:
    """Holds `count` idle connections to one port, from a thread, for the length of a `with` block."""

    def __init__(self, address: str, count: int, said: bytes, *, tls: bool = False, source: str = "127.0.0.1") -> None:
        """Sends `said` on each connection and then nothing more. With `tls`, each connection completes a TLS handshake
        first. `source` is the local address that the connections come from."""
        host, _, port = address.rpartition(":")
        self._to = host, int(port)
        self._count = count
        self._said = said
        self._source = source
        self._tls = _trusting() if tls else None
        self._sockets: dict[int, socket.socket] = {}
        self._poll = select.epoll()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.opened = 0  # connections since the start, reopened ones included

    def __enter__(self) -> Strangers:
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
            one.sendall(self._said)
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
