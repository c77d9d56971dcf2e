"""Starts Redis servers on free ports, and a proxy that causes faults. For benches and tests."""

from __future__ import annotations

import asyncio
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START = 60.0  # seconds a server may take to listen

# Below those that the kernel gives to whoever asks for any and to outgoing connections: none of them takes one between
# our look and its use, or while a server that had it is down.
_OURS = range(10_240, 32_768)
_TRIES = 1_000
_given: set[int] = set()  # by this process, which may not listen there yet


def free_port() -> int:
    """Returns an unused port of the loopback; never the same twice."""
    for port in random.SystemRandom().sample(_OURS, _TRIES):
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise RuntimeError("no port is free")


def write_keys(path: Path) -> Path:
    path.write_text(f"names {secrets.token_hex(32)}\nfirst {secrets.token_hex(32)}\n")
    return path


@dataclass
class RedisServer:
    """Runs a redis-server on the loopback that keeps nothing on disk; it may be stopped and started again."""

    folder: Path
    port: int = field(default_factory=free_port)
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> RedisServer:
        """Returns once it listens."""
        binary = shutil.which("redis-server")
        if binary is None:
            raise RuntimeError("redis-server is needed: apt-get install redis-server")
        self.process = subprocess.Popen(
            [binary, *self._arguments()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return self
            time.sleep(0.01)
        self.stop()
        raise RuntimeError("redis-server did not start")

    def _arguments(self) -> tuple[str, ...]:
        if "--sentinel" in self.arguments:
            return self.arguments  # all that it needs is in its file, which comes first
        listen = () if "--tls-port" in self.arguments else ("--port", str(self.port))
        common = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self.folder))
        return (*listen, *common, *self.arguments)

    def pause(self) -> None:
        """Stops the process: it answers nothing, and its connections stay open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kills it; does nothing where it does not run."""
        if self.process is not None:
            self.resume()
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def _signal(self, what: signal.Signals) -> None:
        if self.process is None:
            raise RuntimeError("it does not run")
        self.process.send_signal(what)

    def command(self, *words: str | bytes) -> bytes:
        """Sends one command over a plain socket, so that tests depend on no client."""
        raw = [word.encode() if isinstance(word, str) else word for word in words]
        request = b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in raw)
        with socket.create_connection(("127.0.0.1", self.port), 5) as link:
            link.sendall(request)
            answer = link.recv(1 << 20)
            while answer and not answer.endswith(b"\r\n"):
                answer += link.recv(1 << 20)
            return answer

    def keys(self, pattern: str) -> list[str]:
        """Returns matching names; none may contain a line end."""
        return [line.decode() for line in self.command("KEYS", pattern).split(b"\r\n")[2::2]]

    def get(self, key: str) -> bytes:
        return self.command("GET", key).split(b"\r\n", 1)[1][:-2]


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder)).start()
        try:
            yield server
        finally:
            server.stop()


class Proxy:
    """Stands between client and server: passes, delays, stalls, or cuts the answer after a number of bytes."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.delay = 0.0  # seconds
        self.cut_after: int | None = None
        self.accepted = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        for source, sink, answers in ((reader, up_writer, False), (up_reader, writer, True)):
            task = asyncio.get_running_loop().create_task(self._pump(source, sink, answers))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, answers: bool) -> None:
        try:
            while data := await source.read(65536):
                if answers and self.delay:
                    await asyncio.sleep(self.delay)
                if answers and self.cut_after is not None:
                    sink.write(data[: self.cut_after])
                    break
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()


@contextmanager
def proxy_in_thread(target: int) -> Iterator[Proxy]:
    """Runs a proxy on an event loop in a thread, for callers that block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        asyncio.run_coroutine_threadsafe(work(), loop).result(10)

    proxy = Proxy(target)
    try:
        run(proxy.start)
        yield proxy
    finally:
        run(proxy.stop)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
