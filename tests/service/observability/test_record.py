"""Every call leaves one record, however it ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from bench.grpc_frames import FrameClient
from service.core.errors import Overloaded, Unauthenticated
from service.observability.record import UNKNOWN_METHOD, Metadata, Observers, RecordBuilder, RequestRecord
from service.transport.call.auth import ALL_RIGHTS, Caller, NoTokens, Presented, Rights
from service.transport.call.inbox import SMALL, Inbox
from service.transport.call.rpc import Call, Endpoints, UnknownMethods, service
from service.transport.call.status import ResourceTypes
from service.transport.call.writer import StallWatch, Writer
from service.transport.port.health import Health

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Doorman(NoTokens):
    """Knows one token."""

    def authorize(self, call: Presented, permitted: Rights) -> Caller:
        if dict(call.invocation_metadata() or ()).get("authorization") == "no":
            raise Unauthenticated("no", "TOKEN_UNKNOWN")
        return super().authorize(call, permitted)


async def echo(call: Call) -> bytes:
    return await call.message()


async def twice(call: Call) -> None:
    with Writer(call.context, StallWatch(30.0), call.origin.record) as writer:
        for _ in range(2):
            await writer.write(await call.message() if not call.origin.record.bytes_in else b"xyz")


async def refuse(call: Call) -> bytes:
    raise Overloaded("full", "QUEUE_FULL", 1.0)


async def fail(call: Call) -> bytes:
    raise KeyError("x")


class Seen:
    """Records, and a way to wait for one."""

    def __init__(self) -> None:
        self.address = ""
        self.records: asyncio.Queue[RequestRecord] = asyncio.Queue()
        self.waits = asyncio.Event()

    async def wait(self, call: Call) -> bytes:
        """A body that never ends."""
        self.waits.set()
        await asyncio.Event().wait()
        return b""

    async def one(self) -> RequestRecord:
        """The only one there is."""
        record = await asyncio.wait_for(self.records.get(), 60)
        await asyncio.sleep(0)
        assert self.records.empty()
        return record


@asynccontextmanager
async def port() -> AsyncIterator[tuple[grpc.aio.Channel, Seen]]:
    """A server of a few methods, and what it saw."""
    seen = Seen()
    observers = Observers([seen.records.put_nowait])
    inbox = Inbox(SMALL, Counter())
    endpoints = Endpoints(Doorman(), inbox, ResourceTypes("m", "r"))
    methods = {name.__name__: endpoints.unary(ALL_RIGHTS, name) for name in (echo, refuse, fail, seen.wait)}
    methods["twice"] = endpoints.stream(ALL_RIGHTS, twice)
    server = grpc.aio.server()
    health = Health(lambda: True, lambda: True).handlers(inbox, observers)
    server.add_generic_rpc_handlers((service("t.T", methods, observers), health, UnknownMethods(inbox, observers)))
    seen.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(seen.address) as channel:
            yield channel, seen
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    ("method", "metadata", "code", "reason"),
    [
        ("t.T/echo", (), "OK", ""),
        ("t.T/echo", (("authorization", "no"),), "UNAUTHENTICATED", "TOKEN_UNKNOWN"),
        ("t.T/refuse", (), "RESOURCE_EXHAUSTED", "QUEUE_FULL"),
        ("t.T/fail", (), "INTERNAL", "INTERNAL"),
        ("grpc.health.v1.Health/Check", (), "INVALID_ARGUMENT", ""),
        ("t.T/SECRET", (), "UNIMPLEMENTED", ""),
        ("secret.Secret/echo", (), "UNIMPLEMENTED", ""),
    ],
)
async def test_one_record_however_it_ends(method: str, metadata: Metadata, code: str, reason: str) -> None:
    async with port() as (channel, seen):
        call = channel.unary_unary(f"/{method}")(b"\xff", metadata=metadata, timeout=60)
        with suppress(grpc.RpcError):
            await call
        record = await seen.one()
        assert (await call.code()).name == record.code == code
        assert record.reason == reason
        assert record.method == (UNKNOWN_METHOD if "ecret" in method.lower() else method)
        assert (
            record.tenant == ("default" if method.startswith("t.T/") and not metadata else "")
            or code == "UNIMPLEMENTED"
        )
        assert record.arrived_at <= record.ended_at


async def test_a_call_that_is_cancelled() -> None:
    async with port() as (channel, seen):
        call = channel.unary_unary("/t.T/wait")(b"", timeout=60)
        await asyncio.wait_for(seen.waits.wait(), 60)
        call.cancel()
        with suppress(grpc.RpcError, asyncio.CancelledError):
            await call
        assert (await seen.one()).code == "CANCELLED"


@pytest.mark.product
async def test_a_call_whose_deadline_passes() -> None:
    """Here: a client that keeps to its deadline cancels as soon as that has passed there."""
    async with port() as (_, seen):
        with FrameClient(seen.address, time.monotonic) as client:
            client.start("/t.T/wait", b"", (("grpc-timeout", "2S"),))
            assert (await seen.one()).code == "DEADLINE_EXCEEDED"


@pytest.mark.product
async def test_a_call_that_has_ended_is_gone_without_a_collection() -> None:
    """gRPC counts a call as one of its connection until nothing refers to it, and refuses others meanwhile."""
    async with port() as (channel, seen):
        gc.collect()
        gc.disable()
        try:
            for method in 20 * ("echo", "refuse", "fail"):
                with suppress(grpc.RpcError):
                    await channel.unary_unary(f"/t.T/{method}")(b"", timeout=60)
                await seen.one()
            kept = sum(type(one).__name__ == "_ServicerContext" for one in gc.get_objects())
        finally:
            gc.enable()
        assert kept <= 3, "the last ones"


async def test_what_a_stream_took() -> None:
    async with port() as (channel, seen):
        metadata = (("x-request-id", "mine"), ("traceparent", PARENT))
        call = channel.unary_stream("/t.T/twice")(b"ab", metadata=metadata, timeout=60)
        assert [message async for message in call] == [b"ab", b"xyz"]
        record = await seen.one()
        assert (record.bytes_in, record.bytes_out, record.messages_out) == (2, 5, 2)
        assert (record.client_request_id, record.traceparent) == ("mine", PARENT)
        assert record.trace_id == PARENT[3:35]
        assert record.read_at is not None
        assert record.arrived_at <= record.read_at <= record.ended_at


@pytest.mark.parametrize(
    "metadata",
    [
        ("x-request-id", "a b"),
        ("x-request-id", "a\x1b[31m"),
        ("x-request-id", "x" * 129),
        ("x-request-id", b"bytes"),
        ("traceparent", PARENT.upper()),
        ("traceparent", "ff" + PARENT[2:]),
        ("traceparent", PARENT + "\n"),
        ("traceparent", f"00-{'0' * 32}-b7ad6b7169203331-01"),
        ("traceparent", f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01"),
    ],
)
def test_identifiers_without_their_shape_are_left_out(metadata: tuple[str, str | bytes]) -> None:
    record = RecordBuilder("m", (metadata,)).build()
    assert (record.client_request_id, record.traceparent, record.trace_id) == ("", "", "")


def test_a_follower_names_its_leader() -> None:
    leader, follower = RecordBuilder(metadata=(("traceparent", PARENT),)), RecordBuilder()
    leader.request_id = "first"
    follower.follows(leader)
    told, link = leader.build(), follower.build()
    assert (link.leader_request_id, link.leader_trace_id, link.leader_span_id) == ("first", PARENT[3:35], told.span_id)
    assert len(told.span_id) == 16
    assert (link.trace_id, link.span_id) == ("", "")


def test_an_observer_that_breaks_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    told: list[RequestRecord] = []

    def broken(record: RequestRecord) -> None:
        raise ValueError("CANARY")

    observers = Observers([broken, told.append])
    with caplog.at_level(logging.DEBUG):
        observers.end(observers.begin("m", ()), "OK")
    assert [record.code for record in told] == ["OK"]
    assert "ValueError" in caplog.text
    assert "CANARY" not in caplog.text
