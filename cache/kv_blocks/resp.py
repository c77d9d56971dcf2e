"""The part of Redis's protocol that moves megabytes: one blocking connection, values read into the caller's buffer."""

from __future__ import annotations

import socket
import ssl
import time

from cache.api import Address, Login

LINE_LIMIT = 65_536
LIST_LIMIT = 1024  # entries of a list, those of lists within it included
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
        return self._value(self._line(deadline), deadline)

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

    def listed(self, *words: bytes, deadline: float) -> list[bytes | int | None] | None:
        """A command whose answer is a short list, with what lists within it hold behind one another."""
        self.send(*words, deadline=deadline)
        found: list[bytes | int | None] = []
        left = self._entries(self._line(deadline))
        if left is None:
            return None
        taken = 0
        while left:
            left, taken = left - 1, taken + 1
            line = self._line(deadline)
            if line[:1] == b"*":
                left += self._entries(line) or 0
            else:
                found.append(self._value(line, deadline))
            if taken + left > LIST_LIMIT:
                raise RespError("a long list")
        return found

    def log_in(self, login: Login, deadline: float) -> None:
        """Does nothing without a password."""
        if login.password:
            user = (login.user.encode(),) if login.user else ()
            self.command(b"AUTH", *user, login.password.encode(), deadline=deadline)

    def _value(self, line: bytes, deadline: float) -> bytes | int | None:
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

    @staticmethod
    def _entries(line: bytes) -> int | None:
        """Of a list; None for none at all. Raises RespError, also on an error answer."""
        if line[:1] == b"-":
            raise RespError(line[1:].split(b" ", 1)[0].decode("ascii", "replace"))
        if line[:1] != b"*":
            raise RespError("not a list")
        count = _number(line[1:])
        return None if count < 0 else count

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
