"""Wraps every RPC: identifies the caller, reads its message, bounds the answer, and maps exceptions to statuses.

All methods are registered as taking a stream, since gRPC reads one message before any code of ours: so the caller is
known first, and reading waits for its turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

import grpc

from service.core.errors import AnswerTooLarge
from service.core.request import Origin
from service.observability.record import UNKNOWN_METHOD, Observers, RecordBuilder
from service.transport.call.auth import Caller, Presented, Rights
from service.transport.call.context import Context
from service.transport.call.errors import forget_frames
from service.transport.call.http2 import MAX_ANSWER_BYTES
from service.transport.call.inbox import Inbox, Incoming
from service.transport.call.status import ResourceTypes, failure_of

if TYPE_CHECKING:  # it has no parameters while it runs
    _GenericHandler = grpc.GenericRpcHandler[bytes, bytes]
else:
    _GenericHandler = grpc.GenericRpcHandler

_log = logging.getLogger(__name__)


class Guard(Protocol):
    def authorize(self, call: Presented, permitted: Rights) -> Caller:
        """Raises Unauthenticated, or PermissionDenied for a caller without any of the rights."""

    def tenants(self) -> frozenset[str]:
        pass


@dataclass(frozen=True, slots=True)
class Call:
    context: Context
    origin: Origin
    incoming: Incoming

    async def message(self) -> bytes:
        """Reads the message, once."""
        data = await self.incoming.read()
        record = self.origin.record
        record.read_at, record.bytes_in = time.monotonic(), len(data)
        return data


@dataclass(frozen=True, slots=True)
class Method:
    """A streamed method writes its responses to the context."""

    handle: Callable[[RecordBuilder, Context], Awaitable[bytes | None]]
    streams: bool


Check = Callable[[str], None]  # of a tenant whose call is not read yet: raises where it need not be
UnaryBody = Callable[[Call], Awaitable[bytes]]
StreamBody = Callable[[Call], Awaitable[None]]


def read_all(tenant: str) -> None:
    pass


class Endpoints:
    def __init__(self, guard: Guard, inbox: Inbox, resources: ResourceTypes) -> None:
        self._guard = guard
        self._inbox = inbox
        self._resources = resources

    def unary(self, permitted: Rights, body: UnaryBody, check: Check = read_all) -> Method:
        async def handle(record: RecordBuilder, context: Context) -> bytes:
            try:
                origin = self._origin(permitted, record, context)
                check(origin.tenant)
                with self._inbox.open(context, origin.tenant) as incoming:
                    response = await body(Call(context, origin, incoming))
                if len(response) > MAX_ANSWER_BYTES:
                    raise AnswerTooLarge(f"the response is larger than {MAX_ANSWER_BYTES} bytes")
                record.bytes_out, record.messages_out = len(response), 1
                return response
            except Exception as error:
                await abort_with(error, record, context, self._resources)

        return Method(handle, streams=False)

    def stream(self, permitted: Rights, body: StreamBody, check: Check = read_all, *, many: bool = False) -> Method:
        """`many`: callers send a stream of messages, which is drained before an error ends the call."""

        async def handle(record: RecordBuilder, context: Context) -> None:
            try:
                origin = self._origin(permitted, record, context)
                check(origin.tenant)
                with self._inbox.open(context, origin.tenant) as incoming:
                    await body(Call(context, origin, incoming))
            except Exception as error:
                if many:
                    await self._inbox.drain(context)
                await abort_with(error, record, context, self._resources)

        return Method(handle, streams=True)

    def _origin(self, permitted: Rights, record: RecordBuilder, context: Context) -> Origin:
        now = time.monotonic()
        remaining = context.time_remaining()
        caller = self._guard.authorize(context, permitted)
        record.tenant = caller.tenant
        deadline = None if remaining is None else now + remaining
        return Origin(caller.tenant, now, deadline, caller.name, record)


async def abort_with(
    error: Exception, record: RecordBuilder, context: Context, resources: ResourceTypes | None = None
) -> NoReturn:
    """Ends the RPC, which has ended already where gRPC cannot write because the caller has gone."""
    if isinstance(error, grpc.aio.InternalError):
        raise asyncio.CancelledError from error
    if isinstance(error, grpc.aio.BaseError):
        raise error
    failure = failure_of(error, resources)
    if failure.code is grpc.StatusCode.INTERNAL:
        # Where it happened, not what it says: the text of a foreign exception may hold a prompt.
        frames = "".join(traceback.format_tb(error.__traceback__))
        _log.error("%s answered as INTERNAL\n%s", type(error).__name__, frames.rstrip())
    forget_frames(error)
    record.code, record.reason = failure.code.name, failure.reason
    try:
        await context.abort(failure.code, failure.message, failure.trailers)
    except grpc.aio.AbortError as aborted:
        # gRPC keeps it in the call, and its frames keep the call, which counts as open until a full collection.
        asyncio.get_running_loop().call_soon(forget_frames, aborted)
        raise
    except grpc.aio.InternalError as gone:
        record.code = ""
        raise asyncio.CancelledError from gone


def service(name: str, methods: Mapping[str, Method], observers: Observers) -> grpc.GenericRpcHandler[bytes, bytes]:
    """Observers are notified of each call once, when it has ended."""
    handlers = {key: _observed(f"{name}/{key}", method, observers) for key, method in methods.items()}
    return grpc.method_handlers_generic_handler(name, handlers)


class UnknownMethods(_GenericHandler):
    """Refuses methods that no service of a port has, as gRPC would, and observes them."""

    def __init__(self, inbox: Inbox, observers: Observers) -> None:
        async def refuse(record: RecordBuilder, context: Context) -> bytes:
            await inbox.drain(context)
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

        self._handler = _observed(UNKNOWN_METHOD, Method(refuse, streams=False), observers)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return self._handler


def _observed(path: str, method: Method, observers: Observers) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def handle(_: object, context: Context) -> bytes | None:
        record = observers.begin(path, context.invocation_metadata() or ())
        try:  # a callback of gRPC's would keep the call, which counts as open, until a full collection
            response = await method.handle(record, context)
            record.code = "OK"
            return response
        finally:
            # Once gRPC has been given the response: no caller should wait for counts and logs.
            asyncio.get_running_loop().call_soon(observers.end, record, record.code or _unanswered(context))

    make = grpc.stream_stream_rpc_method_handler if method.streams else grpc.stream_unary_rpc_method_handler
    return make(handle)


def _unanswered(context: Context) -> str:
    """Returns how an aborted or cancelled call ended: gRPC knows a code only of the former."""
    code = context.code()
    if code is None:
        late = context.time_remaining() == 0
        code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
    return code.name
