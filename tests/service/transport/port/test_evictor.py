"""Silent connections of real ports, looked at by hand with a clock that the test turns."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from bench.grpc_frames import ACK, PREFACE, SETTINGS, frame
from service.config.settings import TlsOptions
from service.observability.record import Observers
from service.transport.call.auth import ALL_RIGHTS, Caller, Presented, Rights
from service.transport.call.http2 import PortBounds
from service.transport.call.inbox import SMALL, Inbox
from service.transport.call.rpc import Call, Endpoints, service
from service.transport.call.status import ResourceTypes
from service.transport.port.evictor import Evictor
from service.transport.port.tls import Certificates
from service.transport.ports import Port, open_port
from tests.service.certificates import HERE, Authority, private_key, write_pair

PATIENCE = 60.0
BOUNDS = PortBounds(connections=16, connection_calls=16, message_bytes=65_536, spare=64)
GREETED = PREFACE + frame(SETTINGS, 0, 0, b"") + frame(SETTINGS, ACK, 0, b"")
HALF_A_HANDSHAKE = bytes.fromhex("16030100ff010000fb0303")
SILENCES = {
    "nothing": (False, b""),
    "half a preface": (False, PREFACE[:9]),
    "a preface without settings": (False, PREFACE),
    "HTTP/2 without a call": (False, GREETED),
    "nothing, for TLS": (True, b""),
    "half a handshake": (True, HALF_A_HANDSHAKE),
    "HTTP/2 without a call, in TLS": (True, GREETED),
}
OWN = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own


class Doorman:
    """Lets everybody in."""

    def authorize(self, call: Presented, permitted: Rights) -> Caller:
        return Caller("a", permitted)

    def tenants(self) -> frozenset[str]:
        return frozenset("a")


class Watched:
    """A port, its evictor and the time."""

    def __init__(self, host: str, credentials: grpc.ServerCredentials | None) -> None:
        self.now = 0.0
        self.going = asyncio.Event()  # calls that wait may end
        inbox, observers = Inbox(SMALL, Counter()), Observers()
        endpoints = Endpoints(Doorman(), inbox, ResourceTypes("m", "r"))
        methods = {"Echo": endpoints.unary(ALL_RIGHTS, self._echo), "Wait": endpoints.unary(ALL_RIGHTS, self._wait)}
        self.port: Port = open_port("listen", f"{host}:0", [service("t.S", methods, observers)], credentials, BOUNDS)
        self.evictor = Evictor(lambda: self.now)
        self.evictor.watch(self.port.number, BOUNDS, inbox.busy)
        self.busy = inbox.busy
        self.busy._clock = lambda: self.now

    async def _echo(self, call: Call) -> bytes:
        return await call.message()

    async def _wait(self, call: Call) -> bytes:
        data = await call.message()
        await self.going.wait()
        return data

    async def look(self, done: Callable[[], bool]) -> None:
        """Looks, a second later, until it is as wished."""
        self.now += 1.0
        async with asyncio.timeout(PATIENCE):
            while not done():
                self.evictor.look()
                await asyncio.sleep(0.01)

    def has(self, count: int) -> Callable[[], bool]:
        """Whether so many connections were there at the last look."""
        return lambda: len(self.evictor._ports[self.port.number].connections) == count


@contextlib.asynccontextmanager
async def watched(host: str = "127.0.0.1", credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[Watched]:
    one = Watched(host, credentials)
    await one.port.server.start()
    try:
        yield one
    finally:
        one.going.set()
        await one.port.server.stop(None)


def opened(port: Port, count: int, said: bytes, context: ssl.SSLContext | None = None) -> list[socket.socket]:
    """Connections that say this and no more; `context`: after a handshake."""
    host = port.address.rpartition(":")[0].strip("[]")
    sockets = [socket.create_connection((host, port.number), PATIENCE) for _ in range(count)]
    if context is not None:
        sockets = [context.wrap_socket(one) for one in sockets]
    for one in sockets:
        one.sendall(said)
    return sockets


@contextlib.contextmanager
def closing(sockets: list[socket.socket]) -> Iterator[list[socket.socket]]:
    try:
        yield sockets
    finally:
        for one in sockets:
            one.close()


def trusting() -> ssl.SSLContext:
    """Does not look at the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def is_open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        while one.recv(4096):
            pass
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except (ConnectionError, ssl.SSLError):
        pass
    return False


def own_channel(port: Port) -> Any:
    return grpc.aio.insecure_channel(port.address, options=OWN)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[grpc.ServerCredentials, grpc.ChannelCredentials]:
    """Of a server and its callers."""
    folder, authority = tmp_path, Authority("ca")
    write_pair(folder, "server", authority.sign(*HERE, key=private_key()))
    certificates = Certificates(TlsOptions(cert=folder / "server.pem", key=folder / "server.key"))
    return certificates.credentials(), grpc.ssl_channel_credentials(authority.pem)


async def answer(port: Port, credentials: grpc.ChannelCredentials | None = None) -> bytes:
    own: Any = (
        own_channel(port) if credentials is None else grpc.aio.secure_channel(port.address, credentials, options=OWN)
    )
    async with own as channel:
        return cast(bytes, await channel.unary_unary("/t.S/Echo")(b"x", timeout=PATIENCE))


@pytest.mark.parametrize(("secured", "said"), SILENCES.values(), ids=SILENCES.keys())
async def test_the_oldest_silent_connections_go_and_newcomers_are_answered(
    secured: bool, said: bytes, pair: tuple[grpc.ServerCredentials, grpc.ChannelCredentials]
) -> None:
    """From one address, which may have twelve of sixteen. Those of one age go in any order."""
    ours, theirs = pair if secured else (None, None)
    context = trusting() if secured and said == GREETED else None
    async with watched(credentials=ours) as one, contextlib.AsyncExitStack() as stack:

        async def more(count: int) -> list[socket.socket]:
            return stack.enter_context(closing(await asyncio.to_thread(opened, one.port, count, said, context)))

        first = await more(6)
        await one.look(one.has(6))
        second = await more(6)
        await one.look(one.has(12))
        third = await more(4)
        await one.look(lambda: sum(map(is_open, first)) <= 2)
        assert sum(map(is_open, first)) == 2
        assert all(map(is_open, [*second, *third]))
        assert await answer(one.port, credentials=theirs) == b"x"
        await one.look(lambda: sum(map(is_open, first)) <= 1)


async def test_a_connection_with_a_call_stays_and_one_that_made_a_call_is_no_older_than_that() -> None:
    async with watched() as one, own_channel(one.port) as waits, own_channel(one.port) as called:
        waiting = asyncio.ensure_future(waits.unary_unary("/t.S/Wait")(b"w", timeout=PATIENCE))
        await one.look(lambda: bool(one.busy._live))
        assert await called.unary_unary("/t.S/Echo")(b"x", timeout=PATIENCE) == b"x"
        await one.look(one.has(2))
        with closing(opened(one.port, 10, GREETED)) as crowd:
            await one.look(one.has(12))
            one.now += 1.0
            assert await called.unary_unary("/t.S/Echo")(b"x", timeout=PATIENCE) == b"x"
            with closing(opened(one.port, 8, GREETED)):
                await one.look(lambda: sum(map(is_open, crowd)) <= 2)
                assert sum(map(is_open, crowd)) == 2
        peers = {connection.peer for connection in one.evictor._known.values()}
        assert set(one.busy._live) <= peers, "named as gRPC names them"
        one.going.set()
        assert await waiting == b"w"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::]"])
async def test_connections_are_named_as_grpc_names_them(host: str) -> None:
    """Else all would look idle."""
    async with watched(host) as one:
        for caller in ("127.0.0.1", "[::1]") if host == "[::]" else (host,):
            async with grpc.aio.insecure_channel(f"{caller}:{one.port.number}", options=OWN) as channel:
                call = cast(Any, channel).unary_unary("/t.S/Wait")(b"w", timeout=PATIENCE)
                await one.look(lambda: bool(one.busy._live))
                one.evictor._looked = -10.0
                one.evictor.look()
                assert set(one.busy._live) <= {known.peer for known in one.evictor._known.values()}
                call.cancel()
                await one.look(lambda: not one.busy._live)


async def test_a_flood_of_newcomers_goes_before_they_have_settled() -> None:
    """Where half of the spare connections are in use: the others are room for the next."""
    async with watched() as one:
        with closing(opened(one.port, 60, GREETED)) as flood:
            async with asyncio.timeout(PATIENCE):
                while sum(map(is_open, flood)) > BOUNDS.connections + BOUNDS.spare // 2:
                    one.evictor.look()
                    await asyncio.sleep(0.01)
            assert await answer(one.port) == b"x"
