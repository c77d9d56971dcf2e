"""Relays as real processes, real channels, and handlers that note what becomes of their calls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from bench.grpc_frames import FrameClient
from service.config.settings import BadSettings, TlsOptions
from service.core.errors import Reason
from service.transport.call.context import Context
from service.transport.call.http2 import PortBounds
from service.transport.port.tls import Certificates
from service.transport.ports import Port, PortTaken, open_port, open_shared_port
from service.transport.relays import process, relays
from service.transport.relays.relays import RelayCounts, RelayOptions, Relays
from tests.service.certificates import HERE, Authority, private_key, write_pair

pytestmark = pytest.mark.product

PATIENCE = 60.0
BOUNDS = PortBounds(connections=64, connection_calls=256, message_bytes=8_000_000)
OWN = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))  # a connection of its own
LARGE = b"x" * 5_000_000


class Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Every method of a port; what happened, in the order in which it did."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.seen: dict[str, Any] = {}
        self.holding = asyncio.Event()  # a call that is held has come
        self.going = asyncio.Event()  # those that are held may go on
        self.ended = asyncio.Event()  # one of them has ended

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:  # type: ignore[type-arg]
        name = details.method.rpartition("/")[2]
        body = cast(Any, getattr(self, name))
        if name in ("count", "hold", "flood"):
            return grpc.stream_stream_rpc_method_handler(body)
        return grpc.stream_unary_rpc_method_handler(body)

    async def echo(self, _: object, context: Context) -> bytes:
        return cast(bytes, await context.read())

    async def describe(self, _: object, context: Context) -> bytes:
        await context.send_initial_metadata((("x-head", "first"),))
        self.seen = {
            "peer": context.peer(),
            "metadata": dict(context.invocation_metadata() or ()),
            "names": {key: list(names) for key, names in context.auth_context().items()},
            "remaining": context.time_remaining(),
        }
        return b"described"

    async def refuse(self, _: object, context: Context) -> bytes:
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION, "not ~ this · way", (("x-why", "text"), ("x-why-bin", b"\x00\xff"))
        )

    async def fail(self, _: object, context: Context) -> bytes:
        raise KeyError("a secret")

    async def count(self, _: object, context: Context) -> None:
        """As many messages as the call's own say, each."""
        while isinstance(data := await context.read(), bytes):
            for number in range(int(data)):
                await context.write(b"%d" % number)

    async def hold(self, _: object, context: Context) -> None:
        try:
            await context.write(b"held")  # its reader may go before it returns
            self.holding.set()
            await self.going.wait()
            self.events.append("done")
        except asyncio.CancelledError:
            self.events.append("late" if context.time_remaining() == 0 else "gone")
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.InternalError):
                await context.write(b"nobody reads this")
            raise
        finally:
            self.ended.set()

    async def flood(self, _: object, context: Context) -> None:
        """Writes to a reader that may be slow, and counts what was taken."""
        for number in range(1000):
            await context.write(b"y" * 65_536)
            self.seen["taken"] = number + 1


Make = Callable[..., Awaitable[tuple[Port, Handlers]]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Ports of relays that have started; stopped in the end, with nothing left behind."""
    made: list[Relays] = []

    async def one(count: int = 2, address: str = "127.0.0.1:0", **more: Any) -> tuple[Port, Handlers]:
        handlers = Handlers()
        counts = RelayCounts(Counter(), Counter())
        port = open_shared_port(
            "listen",
            address,
            [handlers],
            more.get("certificates"),
            BOUNDS,
            RelayOptions(count, more.get("hang_timeout", PATIENCE)),
            counts,
        )
        server = cast(Relays, port.server)
        made.append(server)
        await port.server.start()
        assert counts.processes["listening"] == len(server.pids) == count
        return port, handlers

    yield one
    for server in made:
        pids = server.pids
        await server.stop(None)
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


@contextlib.asynccontextmanager
async def channel(port: Port) -> AsyncIterator[grpc.aio.Channel]:
    """A connection of its own."""
    async with grpc.aio.insecure_channel(port.address, options=OWN) as one:
        yield one


def unary(one: grpc.aio.Channel, name: str) -> Any:
    return one.unary_unary(f"/test.Service/{name}")


def _connections(pid: int) -> int:
    """Of the process, with callers."""
    inodes = {
        os.readlink(f"/proc/{pid}/fd/{fd}")[8:-1]
        for fd in os.listdir(f"/proc/{pid}/fd")
        if os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
    }
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    established = [line.split() for table in tables for line in table]
    return sum(fields[3] == "01" and fields[9] in inodes for fields in established)


async def test_messages_metadata_and_statuses_are_as_without_a_relay(make: Make) -> None:
    """Everything a handler says and is told, beside a server of gRPC's in this process."""
    relayed, handlers = await make()
    plain = open_port("listen", "127.0.0.1:0", [handlers], None, BOUNDS)
    await plain.server.start()
    found = []
    for port in (relayed, plain):
        async with channel(port) as one:
            assert await unary(one, "echo")(LARGE, timeout=PATIENCE) == LARGE
            assert await unary(one, "echo")(b"", timeout=PATIENCE) == b""
            call = unary(one, "describe")(b"", timeout=30, metadata=(("x-text", "a ~ b"), ("x-raw-bin", b"\x00\xff")))
            assert await call == b"described"
            seen = handlers.seen
            assert 0 < seen["remaining"] < 31  # gRPC rounds it up on the wire
            assert seen["peer"].startswith("ipv4:127.0.0.1:")
            seen["metadata"].pop("user-agent")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await unary(one, "refuse")(b"", timeout=PATIENCE)
            error = refused.value
            trailers = [(key, value) for key, value in error.trailing_metadata() or ()]
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await unary(one, "fail")(b"", timeout=PATIENCE)

            stream = one.stream_stream("/test.Service/count")(iter([b"3", b"0", b"2"]), timeout=PATIENCE)
            counted = [message async for message in stream]
            head = [(key, value) for key, value in await call.initial_metadata()]
            found.append(
                (seen["metadata"], head, error.code(), error.details(), trailers, failed.value.code(), counted)
            )
    await plain.server.stop(None)
    assert found[0] == found[1]
    assert found[0][-1] == [b"0", b"1", b"2", b"0", b"1"]


async def test_without_a_deadline_there_is_none(make: Make) -> None:
    port, handlers = await make(1)
    async with channel(port) as one:
        await unary(one, "describe")(b"")
    assert handlers.seen["remaining"] is None


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_a_caller_that_goes_is_noticed(make: Make, how: str) -> None:
    port, handlers = await make(1)
    async with channel(port) as one:
        call = one.unary_stream("/test.Service/hold")(b"", timeout=PATIENCE)
        assert await call.read() == b"held"
        if how == "cancelled":
            call.cancel()
        else:
            await one.close()
        await asyncio.wait_for(handlers.ended.wait(), PATIENCE)
    assert handlers.events == ["gone"]


async def test_a_deadline_that_passes_is_told_from_a_caller_that_goes(make: Make) -> None:
    """A client of gRPC's would go at its deadline itself, a little before it has passed here."""
    port, handlers = await make(1)
    with FrameClient(port.address, time.monotonic) as one:
        one.start("/test.Service/hold", b"", (("grpc-timeout", "2S"),))
        await asyncio.wait_for(handlers.ended.wait(), PATIENCE)
    assert handlers.events == ["late"]


async def test_a_slow_reader_slows_its_handler_and_nobody_else(make: Make) -> None:
    """A write waits until gRPC has taken it, so that nothing piles up in either process."""
    port, handlers = await make(1)
    async with channel(port) as one, channel(port) as other:
        call = one.unary_stream("/test.Service/flood")(b"", timeout=PATIENCE)
        messages = aiter(call)
        await anext(messages)
        await asyncio.sleep(0.2)
        taken = handlers.seen["taken"]
        for _ in range(20):
            assert await unary(other, "echo")(b"meanwhile", timeout=PATIENCE) == b"meanwhile"
        assert taken < 500
        assert len([message async for message in messages]) == 999
    assert handlers.seen["taken"] == 1000


async def test_a_relay_that_dies_takes_its_own_callers_and_is_replaced(make: Make) -> None:
    port, handlers = await make(2)
    server = cast(Relays, port.server)
    async with contextlib.AsyncExitStack() as stack:
        held: dict[int, list[Any]] = {}
        while len(held) < 2:  # which relay gets a connection is the kernel's choice
            before = Counter({pid: _connections(pid) for pid in server.pids})
            one = await stack.enter_async_context(channel(port))
            call = one.unary_stream("/test.Service/hold")(b"", timeout=PATIENCE)
            assert await call.read() == b"held"
            (its,) = Counter({pid: _connections(pid) for pid in server.pids}) - before
            held.setdefault(its, []).append(call)
        dead, alive = held
        os.kill(dead, signal.SIGKILL)
        for call in held[dead]:
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await call.read()
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: handlers.events.count("gone") == len(held[dead]))
        await until(lambda: len(server.pids) == 2)
        assert alive in server.pids
        assert dead not in server.pids
        assert server._counts.processes == {"listening": 2, "deaths": 1}
        handlers.going.set()
        for call in held[alive]:
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
        for _ in range(10):
            async with channel(port) as one:
                assert await unary(one, "echo")(b"again", timeout=PATIENCE) == b"again"


async def test_a_relay_that_hangs_is_killed_and_replaced(make: Make) -> None:
    """Its calls end as those of one that died. A timeout that a relay which runs never reaches, however busy it is."""
    port, handlers = await make(1, hang_timeout=3.0)
    server = cast(Relays, port.server)
    async with channel(port) as one:
        call = one.unary_stream("/test.Service/hold")(b"", timeout=2 * PATIENCE)
        assert await call.read() == b"held"
        (hung,) = server.pids
        os.kill(hung, signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await call.read()
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: handlers.events == ["gone"])
        await until(lambda: len(server.pids) == 1 and server.pids != (hung,))
        assert server._counts.processes == {"listening": 1, "deaths": 1}
    async with channel(port) as one:
        assert await unary(one, "echo")(b"again", timeout=PATIENCE) == b"again"


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


async def test_a_relay_ends_when_the_front_has_gone(make: Make) -> None:
    """However that ended: its socket is closed then."""
    port, _ = await make(1)
    server = cast(Relays, port.server)
    async with channel(port) as one:
        call = one.unary_stream("/test.Service/hold")(b"", timeout=PATIENCE)
        await call.read()
        (relay,) = server._alive
        for supervisor in server._supervisors:
            supervisor.cancel()
        transport = relay._link._transport
        assert transport is not None
        transport.abort()
        await until(lambda: relay.process.poll() is not None)
        assert relay.process.returncode == 0


async def test_one_that_stops_says_goaway_and_lets_calls_end(make: Make) -> None:
    port, handlers = await make(2)
    async with channel(port) as one:
        call = one.unary_stream("/test.Service/hold")(b"", timeout=PATIENCE)
        await call.read()
        closing = asyncio.ensure_future(port.close(PATIENCE))
        await asyncio.sleep(0.3)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async with channel(port) as other:
                await unary(other, "echo")(b"", timeout=PATIENCE)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not closing.done()
        handlers.going.set()
        assert await call.code() is grpc.StatusCode.OK
        await asyncio.wait_for(closing, PATIENCE)
    assert handlers.events == ["done"]


async def test_grace_that_is_over_ends_calls(make: Make) -> None:
    port, handlers = await make(2)
    async with channel(port) as one:
        call = one.unary_stream("/test.Service/hold")(b"", timeout=PATIENCE)
        await call.read()
        await asyncio.wait_for(port.close(0.1), PATIENCE)
        assert await call.code() is not grpc.StatusCode.OK
    await until(lambda: handlers.events == ["gone"])


async def test_a_port_that_somebody_has_is_taken_though_both_would_share_it(make: Make) -> None:
    first, _ = await make(2)
    counts = RelayCounts(Counter(), Counter())
    with pytest.raises(PortTaken):
        open_shared_port("listen", first.address, [Handlers()], None, BOUNDS, RelayOptions(2), counts)
    with pytest.raises(PortTaken):
        open_port("listen", first.address, [Handlers()], None, BOUNDS)
    alone = open_port("listen", "127.0.0.1:0", [Handlers()], None, BOUNDS)
    with pytest.raises(PortTaken):
        open_shared_port("listen", alone.address, [Handlers()], None, BOUNDS, RelayOptions(2), counts)
    with pytest.raises(BadSettings, match=r"listen: the host of no\.such\.host\.invalid:1 cannot be resolved"):
        open_shared_port("listen", "no.such.host.invalid:1", [Handlers()], None, BOUNDS, RelayOptions(2), counts)
    with pytest.raises(BadSettings, match=r"listen: 192\.0\.2\.1:0 cannot be listened on"):
        open_shared_port("listen", "192.0.2.1:0", [Handlers()], None, BOUNDS, RelayOptions(2), counts)


async def test_a_port_is_free_at_once_when_its_server_has_stopped(make: Make) -> None:
    """Also while connections to it are ending."""
    first, _ = await make(2)
    async with channel(first) as one:
        await unary(one, "echo")(b"", timeout=PATIENCE)
        await first.server.stop(None)
    again, _ = await make(2, first.address)
    async with channel(again) as one:
        assert await unary(one, "echo")(b"again", timeout=PATIENCE) == b"again"


async def test_a_name_with_two_addresses_has_the_same_port_on_both(make: Make) -> None:
    port, _ = await make(2, "localhost:0")
    number = int(port.address.rpartition(":")[2])
    for family, *_, where in socket.getaddrinfo("localhost", number, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.create_connection(where[:2], PATIENCE) as one:
            assert one.family == family
    async with channel(port) as one:
        assert await unary(one, "echo")(b"here", timeout=PATIENCE) == b"here"


async def test_a_relay_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "_ENVIRONMENT", ("PATH",))
    monkeypatch.setattr(relays.sys, "executable", "/bin/false")
    counts = RelayCounts(Counter(), Counter())
    port = open_shared_port("listen", "127.0.0.1:0", [Handlers()], None, BOUNDS, RelayOptions(2), counts)
    with pytest.raises(relays.CannotListen, match="exit code 1"):
        await port.server.start()
    await port.server.stop(None)


async def test_callers_are_shown_the_newest_certificate_and_show_theirs(make: Make, tmp_path: Path) -> None:
    authority = Authority("ca")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    for name in ("server", "client"):
        write_pair(tmp_path, name, authority.sign(*HERE, key=private_key()))
    tls = TlsOptions(cert=tmp_path / "server.pem", key=tmp_path / "server.key", client_ca=tmp_path / "ca.pem")
    certificates = Certificates(tls)
    port, handlers = await make(2, certificates=certificates)

    async def identification() -> bytes:
        """The server's certificate, as a new connection sees it; its caller has shown his."""
        pair = ((tmp_path / "client.key").read_bytes(), (tmp_path / "client.pem").read_bytes())
        credentials = grpc.ssl_channel_credentials(authority.pem, *pair)
        async with grpc.aio.secure_channel(port.address, credentials, options=OWN) as one:
            await unary(one, "describe")(b"", timeout=PATIENCE)
        assert set(handlers.seen["names"]) == {"peer_dns"}
        host, _, number = port.address.rpartition(":")
        return await asyncio.to_thread(lambda: certificate_of(host, int(number), tmp_path))

    first = await identification()
    write_pair(tmp_path, "server", authority.sign(*HERE, key=private_key()))
    certificates.reload()
    await until(lambda: certificates.current().chain == (tmp_path / "server.pem").read_bytes())
    await until_changed(identification, first)
    async with channel(port) as one:
        with pytest.raises(grpc.aio.AioRpcError):
            await unary(one, "echo")(b"in the clear", timeout=PATIENCE)


async def until_changed(identification: Callable[[], Awaitable[bytes]], first: bytes) -> None:
    async with asyncio.timeout(PATIENCE):
        while await identification() == first:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.05)


def certificate_of(host: str, port: int, folder: Path) -> bytes:
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(folder / "client.pem", folder / "client.key")
    with socket.create_connection((host, port), PATIENCE) as raw, context.wrap_socket(raw) as secured:
        found = secured.getpeercert(True)
    assert found is not None
    return found


async def test_calls_that_a_busy_front_has_not_seen_are_refused_with_a_hint(make: Make) -> None:
    """The front stands still: a relay keeps so many calls for it and refuses the others by itself."""
    port, _ = await make(1)
    server = cast(Relays, port.server)
    extra = 40
    ended = threading.Semaphore(0)

    def call() -> list[Any]:
        with contextlib.ExitStack() as stack:
            channels = [stack.enter_context(grpc.insecure_channel(port.address, options=OWN)) for _ in range(5)]
            calls = []
            for number in range(process._MOST_UNHEARD + extra):  # of which one connection may have 256
                method = channels[number % len(channels)].unary_unary("/test.Service/echo")
                calls.append(method.future(b"", timeout=2 * PATIENCE))
                calls[-1].add_done_callback(lambda _: ended.release())
            return [(one.code(), dict(one.trailing_metadata() or ())) for one in calls]

    caller = asyncio.get_running_loop().run_in_executor(None, call)
    refused = sum(ended.acquire(timeout=PATIENCE) for _ in range(extra))  # while this loop does nothing else
    assert refused == extra
    found = await caller
    assert Counter(code for code, _ in found) == {
        grpc.StatusCode.OK: process._MOST_UNHEARD,
        grpc.StatusCode.RESOURCE_EXHAUSTED: extra,
    }
    hints = [int(trailers["grpc-retry-pushback-ms"]) for code, trailers in found if code is not grpc.StatusCode.OK]
    assert all(1000 <= hint <= 1500 for hint in hints)
    await until(lambda: server._counts.refusals[Reason.MESSAGES] == extra)
