"""Controls the fork server and its workers from the front."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from engine.constraints.forks import MAX_PACKET
from engine.errors import EngineUnavailable, InvalidModel
from service.core.text.sandbox.control import (
    HEADER,
    MAX_RESULT,
    ConfigureSandbox,
    ForkWorker,
    KillWorker,
    ModelLoaded,
    ModelUnloadable,
    Report,
    WorkerEnded,
    decode_report,
    encode,
)

RETRY = 1.0  # seconds
_LOAD_SECONDS = 30.0
_BACKOFF = (1.0, 60.0)  # seconds between two fork servers: after one that had loaded; at most
_BACK_SECONDS = 10.0  # that a job waits for the next one
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "PYTHONHASHSEED")
_log = logging.getLogger(__name__)


class Worker:
    def __init__(self, sock: socket.socket, kill: Callable[[], None]) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._kill = kill
        self._loop = asyncio.get_running_loop()
        self._busy = False
        self.ended: asyncio.Future[int] = self._loop.create_future()  # exit code, or minus the signal

    async def exchange(self, kind: int, payload: bytes) -> tuple[int, bytes]:
        """Returns how the job ended, and its result. Raises EOFError or OSError where the process dies."""
        self._busy = True
        try:
            await self._loop.sock_sendall(self._socket, HEADER.pack(kind, len(payload)) + payload)
            outcome, size = HEADER.unpack(await self._read(HEADER.size))
            if size > MAX_RESULT:
                raise EOFError
            return outcome, await self._read(size)
        finally:
            self._busy = False
            self._close_unused()

    async def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            more = await self._loop.sock_recv_into(self._socket, view[got:])
            if not more:
                raise EOFError
            got += more
        return bytes(data)

    def kill(self) -> None:
        self._kill()

    def end(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)
        self._close_unused()

    def _close_unused(self) -> None:
        if self.ended.done() and not self._busy:
            self._socket.close()


class ForkServerSupervisor:
    def __init__(self, configure: ConfigureSandbox) -> None:
        self._configure = configure
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._workers: dict[int, Worker] = {}
        self._last_key = 0
        self._loaded = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.digest = ""
        self.served = 0  # fork servers that have loaded

    @property
    def pids(self) -> tuple[int, ...]:
        return () if self._process is None else (self._process.pid,)

    async def start(self) -> None:
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._supervise(first), name="text processes")
        await asyncio.wait((first, self._task), return_when=asyncio.FIRST_COMPLETED)
        await (first if first.done() else self._task)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def fork(self, memory: int) -> Worker:
        """Raises EngineUnavailable where the fork server is not back soon."""
        try:
            async with asyncio.timeout(_BACK_SECONDS):
                await self._loaded.wait()
        except TimeoutError:
            raise EngineUnavailable("text cannot be processed at the moment", RETRY) from None
        assert self._socket is not None
        self._last_key += 1
        key = self._last_key
        ours, theirs = socket.socketpair()
        with theirs:
            worker = self._workers[key] = Worker(ours, lambda: self._send(KillWorker(key)))
            self._send(ForkWorker(key, memory), theirs.fileno())
        return worker

    def _send(self, command: ForkWorker | KillWorker, *descriptors: int) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # then it has gone, and its workers with it
                socket.send_fds(self._socket, [encode(command)], descriptors)

    async def _supervise(self, first: asyncio.Future[None]) -> None:
        delay, most = _BACKOFF
        while True:
            served = self.served
            try:
                how = await self._live(first)
            except InvalidModel as error:
                if not first.done():
                    first.set_exception(error)
                    return
                how = str(error)
            if not first.done():
                first.set_exception(InvalidModel(self._unloadable(how)))
                return
            delay = _BACKOFF[0] if self.served > served else min(2 * delay, most)
            _log.error("the fork server of text processes %s; another is started in %g s", how, delay)
            await asyncio.sleep(delay)

    def _unloadable(self, how: str) -> str:
        problem = f"{self._configure.model}: the process that loads its tokenizer and chat template {how}"
        return f"{problem}; copy it again from where the model came from"

    async def _live(self, first: asyncio.Future[None]) -> str:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            process = self._process = _launch(theirs.fileno())
            theirs.close()
            try:
                self._socket = ours
                ours.send(encode(self._configure))
                ours.setblocking(False)
                try:
                    async with asyncio.timeout(_LOAD_SECONDS):
                        self._begin(await self._receive(ours))
                except TimeoutError:
                    return f"takes more than {_LOAD_SECONDS:g} seconds"
                if not first.done():
                    first.set_result(None)
                while True:
                    self._on_report(await self._receive(ours))
            except (EOFError, OSError):
                code = await _ended(process)
                return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
            finally:
                self._lose(process)

    async def _receive(self, sock: socket.socket) -> Report:
        data = await asyncio.get_running_loop().sock_recv(sock, MAX_PACKET)
        if not data:
            raise EOFError
        return decode_report(data)

    def _begin(self, report: Report) -> None:
        match report:
            case ModelLoaded(digest=digest):
                if self.digest and digest != self.digest:
                    raise InvalidModel(f"{self._configure.model}: the tokenizer has changed; start the server again")
                self.digest = digest
                self.served += 1
                self._loaded.set()
            case ModelUnloadable(message=message):
                raise InvalidModel(message)
            case WorkerEnded():
                raise EOFError

    def _on_report(self, report: Report) -> None:
        if isinstance(report, WorkerEnded) and (worker := self._workers.pop(report.key, None)) is not None:
            worker.end(report.code)

    def _lose(self, process: subprocess.Popen[bytes]) -> None:
        self._loaded.clear()
        self._socket = self._process = None
        process.kill()
        process.wait()  # a moment: it was killed
        for worker in self._workers.values():
            worker.end(-signal.SIGKILL)
        self._workers.clear()


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """Takes milliseconds: the process has closed its socket."""
    while (code := process.poll()) is None:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.005)
    return code


def _launch(fd: int) -> subprocess.Popen[bytes]:
    """Passes on only the environment that it needs. The interpreter ignores the working folder, so that no `service`
    there is taken for ours."""
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    home = Path(__file__).resolve().parents[4]
    if home.name not in ("site-packages", "dist-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(home), environment.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "service.core.text.sandbox.fork_server", "--fd", str(fd)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[fd],
        env=environment | {"TOKENIZERS_PARALLELISM": "false"},  # threads of a library do not survive a fork
        start_new_session=True,  # a terminal's ctrl-C is the front's to handle
    )
