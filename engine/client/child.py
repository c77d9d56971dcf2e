"""Wraps one engine process and the front's end of its socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import cast

from engine.ipc.frames import Command, Report, configure, report_reader
from engine.ipc.framing import FrameError, encode
from engine.ipc.step_mark import MarkedStep, StepMark
from engine.launch import Begun
from engine.settings import EngineSettings

_log = logging.getLogger(__name__)
_EXIT_POLL = 0.01  # seconds between two looks at a process that is about to end
_CHUNK = 256 * 1024  # bytes


class Child(asyncio.Protocol):
    """Passes reports to `on_report`. `closed` is done once no more can come."""

    def __init__(self, process: subprocess.Popen[bytes], mark: StepMark, on_report: Callable[[Report], None]) -> None:
        self._process = process
        self._mark = mark
        self._on_report = on_report
        self._reader = report_reader()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._heard = False  # anything, since the last look
        self._worked: float | None = None  # seconds of processor time, at the last look

    @classmethod
    async def spawn(
        cls, settings: EngineSettings, on_report: Callable[[Report], None], begun: Begun | None = None
    ) -> Child:
        """Starts and configures a process, except for what `begun` has done already."""
        begun = begun or Begun(settings.kind)
        ours, process, mark = begun.take()
        child = cls(process, mark, on_report)
        try:
            await child._loop.create_unix_connection(lambda: child, sock=ours)
        except BaseException:
            ours.close()
            await child.end(grace=0)
            raise
        if not begun.configured:
            child.send(configure(settings))
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Sends with all commands of this turn of the event loop."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(encode(command))

    def was_heard(self) -> bool:
        heard, self._heard = self._heard, False
        return heard

    def has_worked(self) -> bool:
        """Whether the process has computed since the last call: a loading process may send nothing for long."""
        worked = _processor_time(self.pid)
        before, self._worked = self._worked, worked
        return worked is None or worked != before

    def kill(self) -> None:
        self._process.kill()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def last_step(self) -> MarkedStep:
        return self._mark.read()

    async def end(self, grace: float) -> int:
        """Closes the socket, which asks the process to go, and kills it after `grace` seconds. Returns its exit code,
        or minus the signal."""
        if grace and self._transport is not None:
            self._flush()
            self._transport.close()
        else:
            self.kill()
            self.abort()
        try:
            code = await self._exit_code(grace or None)
        except TimeoutError:
            self.kill()
            code = await self._exit_code(None)
        except asyncio.CancelledError:
            self.kill()
            await self._exit_code(None)  # otherwise it would stay a zombie
            raise
        return code

    async def _exit_code(self, within: float | None) -> int:
        """Polls, which needs neither a thread nor a kernel with pidfd_open. Raises TimeoutError."""
        async with asyncio.timeout(within):
            while (code := self._process.poll()) is None:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(_EXIT_POLL)
        return code

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))

    def data_received(self, data: bytes) -> None:
        self._heard = True
        try:
            reports = self._reader.feed(data)
        except FrameError as error:
            _log.error("the engine process sent a broken message: %s", error)
            self.kill()
            self.abort()
            return
        for report in reports:
            self._on_report(report)

    def connection_lost(self, exc: Exception | None) -> None:
        with self._socket:
            if exc is not None and (rest := self._rest()):
                self.data_received(rest)
        if not self.closed.done():
            self.closed.set_result(None)

    def _rest(self) -> bytes:
        """Reads what was sent before the end: the event loop stops reading once a send fails."""
        parts = []
        with contextlib.suppress(OSError):
            while part := self._socket.recv(_CHUNK, socket.MSG_DONTWAIT):
                parts.append(part)
        return b"".join(parts)

    def _flush(self) -> None:
        if self._unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()


def _processor_time(pid: int) -> float | None:
    """Seconds, with those of ended children; None where the system does not report them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime, cstime
    except (OSError, ValueError, IndexError):
        return None


def oom_kills() -> int | None:
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
    except (OSError, ValueError, IndexError):
        return None
