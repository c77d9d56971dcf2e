"""What stands around every RPC, with a context that only records."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from collections import Counter
from typing import Any, cast

import grpc
import pytest

from service.core.errors import Overloaded, Reason, UnknownModel
from service.observability.record import RecordBuilder
from service.pb.whippet.v1 import generation_pb2 as pb
from service.protocols.bodies import as_it_is, unary
from service.protocols.whippet_v1.services import RESOURCES
from service.transport.call.auth import ALL_RIGHTS, NoTokens
from service.transport.call.context import Context
from service.transport.call.http2 import MAX_ANSWER_BYTES
from service.transport.call.inbox import SMALL, Inbox
from service.transport.call.rpc import Call, Endpoints


class Ended(Exception):
    """As grpc.aio.AbortError."""


class Recorder:
    """A context without a deadline."""

    def __init__(self, remaining: float | None = None) -> None:
        self.ended: tuple[grpc.StatusCode, str] | None = None
        self.message = b""
        self._remaining = remaining

    def time_remaining(self) -> float | None:
        return self._remaining

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> bytes:
        return self.message

    async def abort(self, code: grpc.StatusCode, details: str, trailers: Any) -> None:
        self.ended = code, details
        raise Ended


async def call(body: Any, data: bytes = b"", context: Recorder | None = None) -> tuple[bytes | None, Recorder]:
    context = context or Recorder()
    context.message = data
    endpoints = Endpoints(NoTokens(), Inbox(SMALL, Counter()), RESOURCES)
    method = endpoints.unary(ALL_RIGHTS, unary(pb.TokenizeRequest, as_it_is, body))
    try:
        return await method.handle(RecordBuilder(), cast(Context, context)), context
    except Ended:
        return None, context


async def test_a_response_too_large_to_send_is_a_status() -> None:
    async def body(request: pb.TokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text="x" * MAX_ANSWER_BYTES)

    data, context = await call(body)
    assert data is None
    assert context.ended is not None
    assert context.ended[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_call_that_need_not_be_read_is_refused_with_a_hint_and_unread() -> None:
    class Unread(Recorder):
        async def read(self) -> bytes:
            raise AssertionError("it is read")

        async def abort(self, code: grpc.StatusCode, details: str, trailers: Any) -> None:
            self.trailers = dict(trailers)
            await super().abort(code, details, trailers)

    def check(tenant: str) -> None:
        raise Overloaded(f"{tenant} has to wait", Reason.QUEUE_FULL, 0.25)

    async def body(call: Call) -> Any:
        raise AssertionError("it is handled")

    endpoints = Endpoints(NoTokens(), Inbox(SMALL, Counter()), RESOURCES)
    for method in (endpoints.unary(ALL_RIGHTS, body, check), endpoints.stream(ALL_RIGHTS, body, check)):
        context, record = Unread(), RecordBuilder()
        with pytest.raises(Ended):
            await method.handle(record, cast(Context, context))
        assert context.ended == (grpc.StatusCode.RESOURCE_EXHAUSTED, "default has to wait")
        assert context.trailers["grpc-retry-pushback-ms"] == "250"
        assert (record.code, record.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")


async def test_what_a_foreign_exception_says_stays_out_of_status_and_log(caplog: pytest.LogCaptureFixture) -> None:
    async def body(request: pb.TokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        raise KeyError(request.text)

    with caplog.at_level(logging.DEBUG):
        _, context = await call(body, pb.TokenizeRequest(text="a secret").SerializeToString())
    assert context.ended is not None
    assert context.ended[0] is grpc.StatusCode.INTERNAL
    assert "secret" not in context.ended[1]
    assert "secret" not in "".join(record.getMessage() for record in caplog.records)
    assert "KeyError" in caplog.text
    assert "test_rpc.py" in caplog.text


async def test_a_refusal_holds_nothing_of_what_it_refused() -> None:
    """Without a collection: an idle server makes none, and a message may have megabytes."""

    class Held:
        """As a message, but for being seen."""

    seen: list[weakref.ref[Held]] = []

    async def body(request: object, call: Call) -> pb.TokenizeResponse:
        held = Held()
        seen.append(weakref.ref(held))
        raise UnknownModel("x", "served")

    endpoints, context = Endpoints(NoTokens(), Inbox(SMALL, Counter()), RESOURCES), Recorder()
    method = endpoints.unary(ALL_RIGHTS, unary(pb.TokenizeRequest, as_it_is, body))
    gc.disable()
    try:
        with pytest.raises(Ended) as kept:  # as gRPC keeps it
            await method.handle(RecordBuilder(), cast(Context, context))
        assert kept.value.__context__ is not None
        assert seen[0]() is None
    finally:
        gc.enable()


async def test_a_caller_that_has_gone_is_as_good_as_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    async def body(request: pb.TokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        raise grpc.aio.InternalError("the write failed")

    with pytest.raises(asyncio.CancelledError):
        await call(body)

    class Gone(Recorder):
        async def abort(self, code: grpc.StatusCode, details: str, trailers: Any) -> None:
            raise grpc.aio.InternalError("the write failed")

    async def failing(request: pb.TokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        raise UnknownModel("x", "served")

    with pytest.raises(asyncio.CancelledError):
        await call(failing, context=Gone())
    assert caplog.text == ""


async def test_what_else_grpc_raises_passes_through() -> None:
    async def body(request: pb.TokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        raise grpc.aio.UsageError("wrong")

    with pytest.raises(grpc.aio.UsageError):
        await call(body)


async def test_cancellation_passes_through() -> None:
    async def body(request: pb.TokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        await asyncio.sleep(60)
        return pb.DetokenizeResponse()

    task = asyncio.create_task(call(body))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_deadlines_are_told_on_the_clock_of_the_engine() -> None:

    seen: list[Call] = []

    async def body(request: pb.TokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        seen.append(call)
        return pb.DetokenizeResponse()

    begun = time.monotonic()
    await call(body, context=Recorder(5.0))
    ended = time.monotonic()
    await call(body)
    deadline = seen[0].origin.deadline
    assert deadline is not None
    assert begun <= deadline - 5.0 <= ended
    assert seen[1].origin.deadline is None
    assert seen[0].origin.tenant == "default"
