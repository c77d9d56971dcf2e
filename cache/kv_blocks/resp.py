"""The part of Redis's protocol that moves megabytes: one blocking connection, values read into the caller's buffer."""

from __future__ import annotations

import socket
import ssl
import time

from cache.api import Address, Login
from cache.store.redis_replies import (
    HEADER,
    LINE,
    ErrorReply,
    ReplyBounds,
    ReplyProgress,
    ReplyReader,
    ReplyRefusedError,
)

SHORT = ReplyBounds()
HEAD = 4096  # bytes read while looking for a line's end; what of it belongs to a value is copied once


class RespError(Exception):
    """An error answer, or bytes that are not RESP."""


class ForeignValueError(RespError):
    """A fault of the key, not of the server."""


class OtherTypeError(ForeignValueError):
    """The key holds a list, say; the connection stays usable."""


class RespConnection:
    """Connects when made. Deadlines are on `time.monotonic`. After any error but OtherTypeError it is useless."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, deadline: float) -> None:
        self._socket = socket.create_connection(address, _left(deadline))
        self._head = b""
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self._socket.settimeout(_left(deadline))
                self._socket = tls.wrap_socket(self._socket, server_hostname=address.host)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def send(self, *words: bytes | memoryview, deadline: float) -> None:
        """Several commands may be sent before the first answer is read."""
        head = bytearray(b"*%d\r\n" % len(words))
        self._socket.settimeout(_left(deadline))
        for word in words:
            head += b"$%d\r\n" % len(word)
            if len(word) > HEAD:
                self._socket.sendall(head)
                self._socket.sendall(word)
                head = bytearray(b"\r\n")
            else:
                head += bytes(word) + b"\r\n"
        self._socket.sendall(head)

    def answer(self, deadline: float, shape: ReplyBounds = SHORT) -> object:
        """Reads anything but large values. Raises RespError, also on a reply that exceeds `shape`."""
        reader = ReplyReader()
        reader.begin(shape)
        reader.feed(self._head)
        self._head = b""
        try:
            while (progress := reader.advance(shape.elements)) is not ReplyProgress.WHOLE:
                if progress is ReplyProgress.HUNGRY:
                    reader.feed(self._more(deadline))
        except ReplyRefusedError as error:
            raise RespError(str(error)) from None
        self._head = reader.rest
        if isinstance(reader.reply, ErrorReply):
            raise RespError(reader.reply.text.split(" ", 1)[0])
        return reader.reply

    def bulk(self, into: memoryview, deadline: float, begin: float | None = None) -> int | None:
        """Returns the value's length, None where the key is absent. `begin` is an earlier deadline for its first bytes.
        Raises ForeignValueError where the value does not fit, or is no string."""
        line = self._line(deadline if begin is None else begin)
        if line[:1] == b"-":
            word = line[1:].split(b" ", 1)[0].decode("ascii", "replace")
            raise OtherTypeError(word) if word == "WRONGTYPE" else RespError(word)
        length = self._length(line)
        if length is None:
            return None
        if length > len(into):
            raise ForeignValueError("a value larger than its buffer")
        self._fill(into[:length], deadline)
        end = bytearray(2)
        self._fill(memoryview(end), deadline)
        if end != b"\r\n":
            raise RespError("a value without an end")
        return length

    def command(self, *words: bytes | memoryview, deadline: float, shape: ReplyBounds = SHORT) -> object:
        self.send(*words, deadline=deadline)
        return self.answer(deadline, shape)

    def log_in(self, login: Login, deadline: float) -> None:
        if login.password:
            user = (login.user.encode(),) if login.user else ()
            self.command(b"AUTH", *user, login.password.encode(), deadline=deadline)

    def _more(self, deadline: float) -> bytes:
        self._socket.settimeout(_left(deadline))
        more = self._socket.recv(HEAD)
        if not more:
            raise RespError("connection closed")
        return more

    def _line(self, deadline: float) -> bytes:
        while (end := self._head.find(b"\r\n", 0, LINE)) < 0:
            if len(self._head) >= LINE:
                raise RespError("a line without an end")
            self._head += self._more(deadline)
        line, self._head = self._head[:end], self._head[end + 2 :]
        return line

    @staticmethod
    def _length(line: bytes) -> int | None:
        if line == b"$-1":
            return None
        if line[:1] != b"$" or not line[1:].isdigit() or len(line) > HEADER:
            raise RespError("not a value")
        return int(line[1:])

    def _fill(self, into: memoryview, deadline: float) -> None:
        ready = min(len(self._head), len(into))
        into[:ready] = self._head[:ready]
        self._head = self._head[ready:]
        while ready < len(into):
            self._socket.settimeout(_left(deadline))
            count = self._socket.recv_into(into[ready:])
            if count == 0:
                raise RespError("connection closed")
            ready += count


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline")
    return left
