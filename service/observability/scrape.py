"""The metrics port: plain HTTP that answers GET /metrics, with bounds on what its clients can cost.

Runs on the server's own event loop, so that all values are of one moment; only the text is made in a thread, which
nothing else uses.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from service.transport.descriptors import SIDE_PORT
from service.transport.ports import cannot_listen
from service.transport.surplus import Host, first_to_go

PATH = "/metrics"
_MAX_CONNECTIONS = SIDE_PORT
_MAX_HEAD = 8192  # bytes of a request
_TIMEOUT_HEAD = 2.0  # seconds until it has come
_TIMEOUT = 5.0  # seconds for one connection
_TEXT = "text/plain; charset=utf-8"
_REASONS = {
    200: "OK",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Client:
    """Holds one connection of the metrics port. It may be closed for a new connection in any state, because a scrape
    takes milliseconds and a scraper tries again."""

    task: asyncio.Task[None]
    host: Host
    idle_since: float  # when it was accepted; seconds, the loop's clock


class MetricsPort:
    """Bound when it is made, listening from `start` on. Raises PortTaken or BadSettings."""

    def __init__(self, setting: str, address: str, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families
        self._process = ProcessCollector(registry=None)
        self._socket = _bound(setting, address)
        self._server: asyncio.Server | None = None
        self._clients: dict[asyncio.Task[None], _Client] = {}
        self._silent: dict[asyncio.Task[None], _Client] = {}  # clients whose request has not arrived
        self._encoder = ThreadPoolExecutor(1, "metrics")
        self.address = f"{address.rpartition(':')[0]}:{self._socket.getsockname()[1]}"

    async def start(self) -> None:
        """Accepts connections from now on."""
        self._server = await asyncio.start_server(self._accept, sock=self._socket, limit=_MAX_HEAD)

    async def stop(self) -> None:
        """Cuts off scrapes that are under way."""
        self._encoder.shutdown(wait=False)
        if self._server is None:
            self._socket.close()
            return
        self._server.close()
        for task in self._clients:
            task.cancel()
        if self._clients:
            await asyncio.wait(tuple(self._clients))
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a new connection. At the bound, first closes one: a connection that has sent no request, because a
        scraper sends its request at once; where there is none, a connection that is slow to read its response."""
        if len(self._clients) >= _MAX_CONNECTIONS:
            gone = first_to_go(self._silent.values()) or first_to_go(self._clients.values())
            assert gone is not None
            gone.task.cancel()
            self._ended(gone.task)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._serve(reader, writer), name="metrics")
        peer = writer.get_extra_info("peername")
        client = _Client(task, Host.of(peer[0] if peer else "::"), loop.time())
        self._clients[task] = self._silent[task] = client
        task.add_done_callback(self._ended)
        task.add_done_callback(lambda _: writer.close())  # also where it is cancelled before it begins

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._clients.pop(task, None)
        self._silent.pop(task, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT):
                writer.write(await self._answer(reader))
                await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone, or is too slow
        except asyncio.CancelledError:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(_TIMEOUT_HEAD):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(431, _TEXT, b"too long\n")
        task = asyncio.current_task()
        assert task is not None
        self._silent.pop(task, None)
        method, path, accept = _read(head)
        if path != PATH:
            return _response(404, _TEXT, b"there is /metrics\n")
        if method not in ("GET", "HEAD"):
            return _response(405, _TEXT, b"GET it\n")
        try:
            kind, body = await self._page(accept)
        except Exception as error:
            _log.error("the metrics could not be read: %s", type(error).__name__)
            return _response(500, _TEXT, b"see the log\n")
        return _response(200, kind, body, bodiless=method == "HEAD")

    async def _page(self, accept: str) -> tuple[str, bytes]:
        try:
            encode, kind = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is none
            encode, kind = choose_encoder("")
        snapshot = _Snapshot([*self._families(), *self._process.collect()])
        return kind, await asyncio.get_running_loop().run_in_executor(self._encoder, encode, snapshot)


class _Snapshot(Collector):
    """Families that were read on the event loop, for the encoder."""

    def __init__(self, families: list[Metric]) -> None:
        self._all = families

    def collect(self) -> Iterable[Metric]:
        return self._all


def _bound(setting: str, address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        family, _, _, _, where = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(where[:2], family=family, dualstack_ipv6=both)
    except OSError:
        raise cannot_listen(setting, address) from None


def _read(head: bytes) -> tuple[str, str, str]:
    """Method, path and the Accept header; empty where they are missing."""
    first, *rest = head.decode("latin-1").split("\r\n")
    method, target, *_ = [*first.split(" "), "", ""]
    headers = dict(line.lower().split(":", 1) for line in rest if ":" in line)
    accept = headers.get("accept", "").strip()
    return method, target.partition("?")[0], accept if accept.isascii() and accept.isprintable() else ""


def _response(code: int, kind: str, body: bytes, bodiless: bool = False) -> bytes:
    head = f"HTTP/1.1 {code} {_REASONS[code]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + (b"" if bodiless else body)
