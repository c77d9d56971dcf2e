"""Implements a gRPC client that costs next to nothing: one HTTP/2 socket whose answers are counted, not decoded.

What it measures is then the server. It opens the flow-control windows as far as they go, so that only the server and
the kernel set the pace; a window of another size, or a reader that never reads, can be configured.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED = 0x1, 0x1, 0x4, 0x8
_WIDE = (1 << 31) - 1
_CHUNK = 1 << 20
_MOST = 1 << 14  # bytes in a frame that a server takes unasked
_FIRST_WINDOW = 65_535  # bytes that a server takes before it says more


@dataclass(slots=True)
class ReceivedStream:
    messages: int = 0
    first_at: float | None = None  # when its first message was complete; seconds, the clock of `now`
    status: int | None = None  # gRPC code, once it has ended
    headers: dict[str, str] = field(default_factory=dict)
    _rest: bytes = b""  # a message that has not come whole


class FrameClient:
    def __init__(
        self,
        address: str,
        now: Callable[[], float],
        *,
        stream_window: int = _WIDE,
        on_message: Callable[[ReceivedStream, bytes], None] | None = None,
    ) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host.strip("[]"), int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.streams: dict[int, ReceivedStream] = {}
        self.messages = 0
        self.ended = 0
        self.last_stream: int | None = None  # that the server will answer, once it has sent GOAWAY
        self._authority = address
        self._now = now
        self._on_message = on_message
        self._encoder = hpack.Encoder()
        self._decoder = hpack.Decoder()
        self._rest = b""
        self._next_id = 1
        settings = struct.pack(">HIHI", 0x4, stream_window, 0x5, (1 << 24) - 1)
        wide = struct.pack(">I", _WIDE - 65_535)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, wide))

    def start(self, path: str, message: bytes, metadata: tuple[tuple[str, str], ...] = ()) -> int:
        """Sends one request. Returns its stream id."""
        stream_id, data = self.prepare(path, message, metadata)
        self.socket.sendall(data)
        return stream_id

    def prepare(self, path: str, message: bytes, metadata: tuple[tuple[str, str], ...] = ()) -> tuple[int, bytes]:
        """Returns one request's stream id, and what to send of it before anything that is prepared or started later."""
        stream_id = self._next_id
        self._next_id += 2
        self.streams[stream_id] = ReceivedStream()
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", self._authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *metadata,
        ]
        body = b"\0" + struct.pack(">I", len(message)) + message
        if len(body) > _FIRST_WINDOW:
            raise ValueError(
                f"a request of {len(body)} bytes: more than {_FIRST_WINDOW} would have to wait for a window"
            )
        cuts = range(0, len(body), _MOST)
        frames = [frame(HEADERS, END_HEADERS, stream_id, self._encoder.encode(headers))]
        for at in cuts:
            frames.append(frame(DATA, END_STREAM if at == cuts[-1] else 0, stream_id, body[at : at + _MOST]))
        return stream_id, b"".join(frames)

    def reset(self, stream_id: int) -> None:
        self.socket.sendall(frame(RST_STREAM, 0, stream_id, struct.pack(">I", 8)))

    def read(self) -> bool:
        """Takes what has come; waits for something. False where the server has hung up."""
        data = self.socket.recv(_CHUNK)
        if not data:
            return False
        if self._rest:
            data = self._rest + data
        at, size = 0, len(data)
        while size - at >= 9:
            length = int.from_bytes(data[at : at + 3], "big")
            end = at + 9 + length
            if end > size:
                break
            self._take(data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : at + 9], "big"), data, at + 9, end)
            at = end
        self._rest = data[at:]
        return True

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> FrameClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, kind: int, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        if kind == DATA:
            stream = self.streams[stream_id]
            whole = int.from_bytes(data[start + 1 : start + 5], "big") == end - start - 5
            if whole and self._on_message is None and not stream._rest:
                self._count(stream)  # the common case: the frame holds exactly one message
            else:
                self._messages(stream, data[start:end])
        elif kind == HEADERS:
            if flags & PADDED or not flags & END_HEADERS:
                raise ValueError("padded or continued headers are not understood")
            self._headers(self.streams[stream_id], self._decoder.decode(data[start:end]), bool(flags & END_STREAM))
        elif kind == RST_STREAM:
            self._end(self.streams[stream_id], 1)
        elif kind == SETTINGS and not flags & ACK:
            self.socket.sendall(frame(SETTINGS, ACK, 0, b""))
        elif kind == GOAWAY:
            self.last_stream = int.from_bytes(data[start : start + 4], "big")
        elif kind == PING and not flags & ACK:
            self.socket.sendall(frame(PING, ACK, 0, data[start:end]))

    def _messages(self, stream: ReceivedStream, payload: bytes) -> None:
        """Parses a DATA frame that holds several messages, or parts of some."""
        data = stream._rest + payload if stream._rest else payload
        at, size = 0, len(data)
        while size - at >= 5:
            end = at + 5 + int.from_bytes(data[at + 1 : at + 5], "big")
            if end > size:
                break
            if self._on_message is not None:
                self._on_message(stream, data[at + 5 : end])
            self._count(stream)
            at = end
        stream._rest = data[at:]

    def _count(self, stream: ReceivedStream) -> None:
        if stream.first_at is None:
            stream.first_at = self._now()
        stream.messages += 1
        self.messages += 1

    def _headers(self, stream: ReceivedStream, headers: Iterable[tuple[str | bytes, str | bytes]], last: bool) -> None:
        stream.headers.update((str(name), str(value)) for name, value in headers)
        if last:
            self._end(stream, int(stream.headers.get("grpc-status", "2")))

    def _end(self, stream: ReceivedStream, status: int) -> None:
        if stream.status is None:
            stream.status = status
            self.ended += 1


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload
