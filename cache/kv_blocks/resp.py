"""The part of Redis's protocol that moves megabytes: one blocking connection, values read into the caller's buffer."""

from __future__ import annotations

import socket
import ssl
import time
from urllib.parse import unquote, urlsplit

from cache.api import RedisSettings

LINE_LIMIT = 65_536
HEAD = 4096  # bytes read while looking for a line's end; what of it belongs to a value is copied once


class RespError(Exception):
    """An error answer, or bytes that are not RESP."""


class ForeignValueError(RespError):
    """What the key holds is none of ours. It says something about the key, and nothing about the server."""


class OtherTypeError(ForeignValueError):
    """A list, say, where a string was asked for. The connection is as good as before."""


class RespConnection:
    """Connects when made. Every call has a deadline on `time.monotonic`. After any error but OtherTypeError the
    connection is useless."""

    def __init__(self, settings: RedisSettings, deadline: float) -> None:
        parts = urlsplit(settings.url)
        self._socket = socket.create_connection((parts.hostname or "localhost", parts.port or 6379), _left(deadline))
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if parts.scheme == "rediss":
                cafile = None if settings.ca_file is None else str(settings.ca_file)
                context = ssl.create_default_context(cafile=cafile)
                self._socket = context.wrap_socket(self._socket, server_hostname=parts.hostname)
            self._head = b""
            self._greet(settings, deadline)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def send(self, *words: bytes | memoryview, deadline: float) -> None:
        """One command. Several may be sent before the first answer is read; answers come in the same order."""
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

    def answer(self, deadline: float) -> bytes | int | None:
        """A short answer: status, number or small value. Raises RespError on an error answer."""
        line = self._line(deadline)
        mark, rest = line[:1], line[1:]
        if mark == b"+":
            return rest
        if mark == b":":
            return _number(rest)
        if mark == b"-":
            raise RespError(rest.split(b" ", 1)[0].decode("ascii", "replace"))
        length = self._length(line)
        if length is None:
            return None
        if length > LINE_LIMIT:
            raise RespError("a long answer")
        value = bytearray(length + 2)
        self._fill(memoryview(value), deadline)
        return bytes(value[:length])

    def bulk(self, into: memoryview, deadline: float, begin: float | None = None) -> int | None:
        """Reads a value into a buffer and returns its length, None where the key is absent. `begin` is an earlier
        deadline for its first bytes. Raises ForeignValueError where the value does not fit, or is no string."""
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

    def command(self, *words: bytes | memoryview, deadline: float) -> bytes | int | None:
        self.send(*words, deadline=deadline)
        return self.answer(deadline)

    def _greet(self, settings: RedisSettings, deadline: float) -> None:
        parts = urlsplit(settings.url)
        password = settings.password()
        if password is None:
            password = unquote(parts.password) if parts.password else ""
        if password:
            user = (unquote(parts.username).encode(),) if parts.username else ()
            self.command(b"AUTH", *user, password.encode(), deadline=deadline)
        if database := parts.path.strip("/"):
            self.command(b"SELECT", database.encode(), deadline=deadline)

    def _line(self, deadline: float) -> bytes:
        while (end := self._head.find(b"\r\n")) < 0:
            if len(self._head) > LINE_LIMIT:
                raise RespError("a line without an end")
            self._socket.settimeout(_left(deadline))
            more = self._socket.recv(HEAD)
            if not more:
                raise RespError("connection closed")
            self._head += more
        line, self._head = self._head[:end], self._head[end + 2 :]
        return line

    @staticmethod
    def _length(line: bytes) -> int | None:
        if line[:1] != b"$":
            raise RespError("not a value")
        length = _number(line[1:])
        return None if length < 0 else length

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


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise RespError("not a number") from None
