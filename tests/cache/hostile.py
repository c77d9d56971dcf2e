"""Who answers in Redis's place, on the loopback: replies larger than anybody asked for, and without an end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from bench.redis_server import START

MOST = 64 * 2**20  # bytes sent on a connection that nobody closes
GREETING = b"*4\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n$4\r\nrole\r\n$6\r\nmaster\r\n"


@dataclass(frozen=True)
class Reply:
    """What begins with `head` and goes on with `body` for ever, `pause` seconds apart."""

    head: bytes
    body: bytes = b""
    pause: float = 0.0


def chunk(piece: bytes) -> bytes:
    """So much of it that sending is quick."""
    return piece * max(1, (1 << 16) // len(piece))


ENDLESS = {
    "a list of small numbers": Reply(b"*1000000000\r\n", chunk(b":1\r\n")),
    "a list of nothing": Reply(b"*1000000000\r\n", chunk(b"$-1\r\n")),
    "a list of empty values": Reply(b"*1000000000\r\n", chunk(b"$0\r\n\r\n")),
    "a list of empty lists": Reply(b"*1000000000\r\n", chunk(b"*0\r\n")),
    "a list of statuses": Reply(b"*1000000000\r\n", chunk(b"+\r\n")),
    "a list of errors": Reply(b"*1000000000\r\n", chunk(b"-ERR no\r\n")),
    "lists within lists": Reply(b"", chunk(b"*1\r\n")),
    "wide lists within lists": Reply(b"", chunk(b"*2\r\n:1\r\n")),
    "a value": Reply(b"$536870912\r\n", chunk(b"x")),
    "a value in a list": Reply(b"*2\r\n$536870912\r\n", chunk(b"x")),
    "a value of more digits than 64 bits": Reply(b"$" + b"9" * 23 + b"\r\n", chunk(b"x")),
    "a length without an end": Reply(b"$", chunk(b"1")),
    "a count without an end": Reply(b"*", chunk(b"0")),
    "a number without an end": Reply(b":", chunk(b"7")),
    "a status without an end": Reply(b"+", chunk(b"x")),
    "an error without an end": Reply(b"-ERR ", chunk(b"x")),
    "no reply at all": Reply(b"", chunk(b"x")),
    "empty lines": Reply(b"", chunk(b"\r\n")),
    "a list in drops": Reply(b"*1000000000\r\n", b":1\r\n", 0.001),
    "a value in drops": Reply(b"$100000\r\n", b"x", 0.001),
    "silence after a promise": Reply(b"$10\r\n"),
    "a map": Reply(b"%1000000000\r\n", chunk(b":1\r\n:2\r\n")),
    "a set": Reply(b"~1000000000\r\n", chunk(b":1\r\n")),
    "pushes": Reply(b"", chunk(b">2\r\n+message\r\n+x\r\n")),
    "a push": Reply(b">1000000000\r\n", chunk(b":1\r\n")),
    "attributes": Reply(b"", chunk(b"|1\r\n+a\r\n:1\r\n")),
    "verbatim text": Reply(b"=536870912\r\ntxt:", chunk(b"x")),
    "a blob of an error": Reply(b"!536870912\r\n", chunk(b"x")),
    "a big number": Reply(b"(", chunk(b"7")),
    "a double": Reply(b",", chunk(b"7")),
    "streamed text": Reply(b"$?\r\n", chunk(b";4\r\nabcd\r\n")),
    "a streamed list": Reply(b"*?\r\n", chunk(b":1\r\n")),
    "nulls and booleans": Reply(b"", chunk(b"_\r\n#t\r\n")),
}


@dataclass
class Hostile:
    """Answers every command with the same, HELLO as Redis does unless `greets` is False."""

    reply: Reply
    greets: bool = True
    sent: int = 0  # bytes, of the connection that took the most
    ended: int = 0  # connections that the other side closed
    used_up: int = 0  # connections that took all there is: nobody closed them
    connections: list[socket.socket] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def accept(self) -> None:
        """Body of the accepting thread."""
        with suppress(OSError):
            while not self._over.is_set():
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
                self.connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def stop(self, accepting: threading.Thread) -> None:
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # which ends an accept that waits
        accepting.join(START)  # what it has taken is in the list now
        self._listener.close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            words = connection.makefile("rb")
            while head := words.readline():
                command = [words.read(int(words.readline()[1:]) + 2)[:-2] for _ in range(int(head[1:]))]
                if self.greets and command[0] == b"HELLO":
                    connection.sendall(GREETING)
                else:
                    self._flood(connection)
        except (OSError, ValueError):
            pass
        self.ended += 1

    def _flood(self, connection: socket.socket) -> None:
        connection.sendall(self.reply.head)
        sent = len(self.reply.head)
        while not self._over.is_set():
            if sent >= MOST:
                self.used_up += 1
                return
            if not self.reply.body:
                return
            self._over.wait(self.reply.pause)
            sent += connection.send(self.reply.body)
            self.sent = max(self.sent, sent)


@contextmanager
def answering(reply: Reply, greets: bool = True) -> Iterator[Hostile]:
    one = Hostile(reply, greets)
    thread = threading.Thread(target=one.accept, daemon=True)
    thread.start()
    try:
        yield one
    finally:
        one.stop(thread)
