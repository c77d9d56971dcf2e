"""Real Redis servers on free ports, a proxy that misbehaves, and both stores under one fixture."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cache.api import Store
from cache.counters import Counters
from cache.keyring import Keyring
from cache.memory import MemoryStore
from cache.redis_store import RedisStore
from cache.semantic.embedder import OnnxEmbedder
from cache.semantic.export import exported
from cache.settings import RedisSettings


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class RedisServer:
    folder: Path
    port: int
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> RedisServer:
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.fail("the tests need redis-server: apt-get install redis-server")
        listen = () if "--tls-port" in self.arguments else ("--port", str(self.port))
        common = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self.folder))
        self.process = subprocess.Popen(
            [binary, *listen, *common, *self.arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return self
            time.sleep(0.01)
        pytest.fail("redis-server did not start within 10 s")

    def pause(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self.process is not None:
            self.resume()
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def command(self, *words: str | bytes) -> bytes:
        """One command over a bare socket: the tests' own way in, no redis-py."""
        raw = [word.encode() if isinstance(word, str) else word for word in words]
        request = b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in raw)
        with socket.create_connection(("127.0.0.1", self.port), 5) as link:
            link.sendall(request)
            return link.recv(1 << 20)


class Proxy:
    """Between client and server: passes, delays, stalls, or cuts the answer after so many bytes."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.delay = 0.0
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
        assert self._server is not None
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


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), free_port()).start()
    yield server
    server.stop()


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """Empty, and this test's alone."""
    shared_redis.command("FLUSHALL")
    return shared_redis


@pytest.fixture
def make_redis(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Servers that a test may ruin; `started=False` keeps a port for later."""
    servers: list[RedisServer] = []

    def make(*arguments: str, port: int | None = None, started: bool = True) -> RedisServer:
        server = RedisServer(tmp_path, port or free_port(), arguments)
        servers.append(server)
        return server.start() if started else server

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
async def make_proxy() -> AsyncIterator[Callable[[int], object]]:
    proxies: list[Proxy] = []

    async def make(target: int) -> Proxy:
        proxies.append(await Proxy(target).start())
        return proxies[-1]

    yield make
    for proxy in proxies:
        await proxy.stop()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def keyring() -> Keyring:
    return Keyring.generate()


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, counters: Counters) -> AsyncIterator[Store]:
    """Each of the two stores. The Redis one has a roomy budget: here it is about what it says, not when."""
    if request.param == "memory":
        yield MemoryStore(64 * 2**20)
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    made = RedisStore(RedisSettings(url=server.url, budget=2.0, write_budget=2.0, jitter=0.0), counters)
    yield made
    await made.aclose()


@pytest.fixture
def unused_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def embedder() -> OnnxEmbedder:
    """The real one; made once a machine and kept in the user's cache folder."""
    return OnnxEmbedder(exported())
