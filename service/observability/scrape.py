"""Serves the metrics port: GET /metrics over HTTP, or TLS with certificates, with bounds on its clients' cost; the
port's site, such as the console, answers other paths. Runs on the server's event loop, so that all values are of one
moment."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from service.transport.port.http1 import MAX_HEAD, Exchange, RequestHead, RequestRefused, Site, parse_head, response
from service.transport.port.surplus import Host, first_to_go
from service.transport.ports import cannot_listen
from service.transport.process.descriptors import SIDE_PORT

PATH = "/metrics"
_MAX_CONNECTIONS = SIDE_PORT
_MAX_STREAMS = SIDE_PORT // 4  # connections whose response may last; all others stay for scrapes and pages
_TIMEOUT_HEAD = 2.0  # seconds until a request has come
_TIMEOUT = 5.0  # seconds for one response; up to four times as long on a connection that is kept
_PAUSE = 0.1  # seconds after which a connection is accepted again where descriptors are short
_TLS_RECORD = b"\x16"  # first byte of what a TLS client sends
_log = logging.getLogger(__name__)


class _Client:
    """May be closed for a new connection in any state but one, because a scraper tries again: a response that may last
    is not cut for others."""

    def __init__(self, task: asyncio.Task[None], host: Host, accepted: float, streams: set[_Client]) -> None:
        self.task = task
        self.host = host
        self.opened = False  # whether streams own the socket
        self.limit: asyncio.Timeout | None = None  # of the whole exchange
        self.accepted = accepted  # or sent its last request; seconds, the loop's clock
        self._streams = streams

    @property
    def idle_since(self) -> float | None:
        return None if self in self._streams else self.accepted

    def take(self) -> bool:
        if len(self._streams) >= _MAX_STREAMS:
            return False
        self._streams.add(self)
        self.wait(None)
        return True

    def end(self) -> None:
        self._streams.discard(self)
        self.wait(asyncio.get_running_loop().time() + _TIMEOUT)

    def go_on(self, now: float) -> None:
        """Bounds what follows where that is bounded too soon: a timer is not set anew for each request."""
        until = None if self.limit is None else self.limit.when()
        if until is None or until - now < _TIMEOUT:
            self.wait(now + 4 * _TIMEOUT)

    def wait(self, until: float | None) -> None:
        if self.limit is not None:
            self.limit.reschedule(until)


class _Streams(asyncio.StreamReaderProtocol):
    """Answers a polling page's repeated request without waking the connection's task, which costs several times what
    the response does."""

    head = b""  # of that request
    repeat: Callable[[], bool] | None = None  # whether it was answered

    def data_received(self, data: bytes) -> None:
        if self.repeat is not None and data == self.head and self.repeat():
            return
        self.repeat = None  # the task is at work, and what comes now is not to overtake it
        super().data_received(data)


class MetricsPort:
    """Bound when it is made, listening from `start` on. Raises PortTaken or BadSettings."""

    def __init__(
        self,
        setting: str,
        address: str,
        families: Callable[[], Iterable[Metric]],
        site: Site | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`site` answers paths other than PATH. `tls`: the context for a new connection that begins with TLS."""
        self._families = families
        self._site = site
        self._tls = tls
        self._process = ProcessCollector(registry=None)
        self._socket = _bound(setting, address)
        self._accepting: asyncio.Task[None] | None = None
        self._clients: dict[asyncio.Task[None], _Client] = {}
        self._silent: dict[asyncio.Task[None], _Client] = {}  # clients whose request has not arrived
        self._streams: set[_Client] = set()  # clients whose response may last
        self._encoder = ThreadPoolExecutor(1, "metrics")
        self.address = f"{address.rpartition(':')[0]}:{self._socket.getsockname()[1]}"

    async def start(self) -> None:
        self._socket.setblocking(False)
        self._accepting = asyncio.create_task(self._accept_all(), name="metrics port")

    async def stop(self) -> None:
        self._encoder.shutdown(wait=False)
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        self._socket.close()
        for task in self._clients:
            task.cancel()
        if self._clients:
            await asyncio.wait(tuple(self._clients))

    async def _accept_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(self._socket)
            except OSError:  # no descriptor is left, or the client has gone again
                await asyncio.sleep(_PAUSE)
                continue
            self._accept(accepted, Host.of(peer[0]), loop)

    def _accept(self, accepted: socket.socket, host: Host, loop: asyncio.AbstractEventLoop) -> None:
        """At the bound, first closes a connection that has sent no request, because a scraper sends its own at once;
        else one that is slow to read its response."""
        if len(self._clients) >= _MAX_CONNECTIONS:
            gone = first_to_go(self._silent.values()) or first_to_go(self._clients.values())
            assert gone is not None, "streams are fewer than connections"
            gone.task.cancel()
            self._ended(gone.task)
        task = loop.create_task(self._serve(accepted), name="metrics")
        client = _Client(task, host, loop.time(), self._streams)
        self._clients[task] = self._silent[task] = client
        task.add_done_callback(self._ended)
        # Also where the task is cancelled before it begins.
        task.add_done_callback(lambda _: None if client.opened else accepted.close())

    def _ended(self, task: asyncio.Task[None]) -> None:
        client = self._clients.pop(task, None)
        self._silent.pop(task, None)
        if client is not None:
            self._streams.discard(client)

    async def _serve(self, accepted: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        client, writer = self._clients[task], None
        try:
            async with asyncio.timeout(_TIMEOUT) as client.limit:
                async with asyncio.timeout(_TIMEOUT_HEAD):
                    reader, writer = await _opened(accepted, self._tls)
                    client.opened = True
                    head = await _head(reader)
                while await self._answered(head, reader, writer, client):
                    head = await _head(reader)
                writer.close()
                await writer.wait_closed()
        except RequestRefused as refusal:
            if writer is not None:
                writer.write(refusal.response())
                writer.close()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            if writer is not None:  # the client has gone, is too slow, or has to go
                writer.transport.abort()
        except Exception as error:
            _log.error("a request of the metrics port raised %s", type(error).__name__)
            if writer is not None:
                writer.transport.abort()

    async def _answered(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: _Client
    ) -> bool:
        self._silent.pop(client.task, None)
        now = asyncio.get_running_loop().time()
        client.go_on(now)
        request = parse_head(head)
        exchange = Exchange(request, reader, writer, client)
        await self._answer(request, exchange)
        await writer.drain()
        if exchange.keeps:
            client.accepted = now
            self._silent[client.task] = client
            protocol = writer.transport.get_protocol()
            assert isinstance(protocol, _Streams)
            protocol.head, protocol.repeat = head, partial(_repeat, exchange, client)
        return exchange.keeps

    async def _answer(self, request: RequestHead, exchange: Exchange) -> None:
        if request.path != PATH:
            if self._site is None:
                raise RequestRefused(404, "there is /metrics")
            await self._site.answer(exchange)
            return
        if request.method not in ("GET", "HEAD"):
            raise RequestRefused(405, "GET it")
        try:
            kind, body = await self._page(request.headers.get("accept", ""))
        except Exception as error:
            _log.error("the metrics could not be read: %s", type(error).__name__)
            raise RequestRefused(500, "see the log") from None
        exchange.writer.write(response(200, kind, body, bodiless=request.method == "HEAD"))

    async def _page(self, accept: str) -> tuple[str, bytes]:
        accept = accept.lower() if accept.isascii() and accept.isprintable() else ""
        try:
            encode, kind = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is none
            encode, kind = choose_encoder("")
        snapshot = _Snapshot([*self._families(), *self._process.collect()])
        return kind, await asyncio.get_running_loop().run_in_executor(self._encoder, encode, snapshot)


def _repeat(exchange: Exchange, client: _Client) -> bool:
    """Whether the response was sent once more. A client that reads slowly waits for the task."""
    if exchange.again is None or exchange.writer.transport.get_write_buffer_size():
        return False
    found = exchange.again()
    if found is None:
        return False
    exchange.writer.write(found)
    client.accepted = asyncio.get_running_loop().time()
    client.go_on(client.accepted)
    return True


async def _opened(
    accepted: socket.socket, tls: Callable[[], ssl.SSLContext] | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Uses TLS where there is a context and the client speaks it."""
    loop = asyncio.get_running_loop()
    context = tls() if tls is not None and await _first_byte(accepted) == _TLS_RECORD else None
    reader = asyncio.StreamReader(MAX_HEAD)
    protocol = _Streams(reader)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, accepted, ssl=context, ssl_shutdown_timeout=None if context is None else _TIMEOUT_HEAD
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _first_byte(accepted: socket.socket) -> bytes:
    """The byte stays to be read; empty where the client has gone."""
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(accepted, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(accepted)
    return accepted.recv(1, socket.MSG_PEEK)


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise RequestRefused(431, "too long") from None


class _Snapshot(Collector):
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
