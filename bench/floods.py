"""Clients that mean harm, on the loopback: HTTP/2 by hand, as fast as a socket takes it, within a time and a count."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import hpack

from bench.grpc_frames import (
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
    """One connection. What the server says is thrown away."""

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
        """The frames of one more call: its headers, some bytes that do not end it unless `ended`, and a reset."""
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
        """Sends no more, and waits until the server has nothing more to say."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        self._drainer.join(20)
        self.socket.close()

    def close(self) -> None:
        """Hangs up."""
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
    """The first `size` bytes of a message that is said to be `declared` long."""
    return b"\0" + struct.pack(">I", declared) + b"\x1a" + b"x" * (size - 6)


@contextlib.contextmanager
def silent(address: str, count: int) -> Iterator[int]:
    """Connections that say nothing; how many were had."""
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
    """A field that has a length, of about `size` bytes, full of the same entry."""
    content = entry * (size // len(entry))
    left, prefix = len(content), bytearray([number << 3 | 2])
    while left >= 0x80:
        prefix.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes(prefix) + bytes([left]) + content
