"""The engine process's end of the socket to the front."""

from __future__ import annotations

import select
import socket

from engine.ipc.frames import Command, Report, command_reader
from engine.ipc.framing import encode

_CHUNK = 256 * 1024  # bytes


class EngineLink:
    """Sends by blocking, since an engine need not run ahead of a front that does not read."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._reader = command_reader()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, report: Report) -> None:
        """Blocks until the kernel has it. OSError where the front has gone."""
        self._socket.sendall(encode(report))

    def receive(self, timeout: float | None) -> list[Command]:
        """Waits `timeout` seconds for a command, None forever. EOFError where the front has gone."""
        if timeout != 0 and not self._poll.poll(None if timeout is None else max(1, round(timeout * 1000))):
            return []
        try:
            data = self._socket.recv(_CHUNK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        return self._reader.feed(data)
