"""Around every RPC: who calls, the size of the answer, and exception to status. Bodies take and give bytes."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol

import grpc

from service.core.errors import AnswerTooLarge
from service.core.request import Origin
from service.transport.auth import Caller, Metadata, Right
from service.transport.status import ResourceTypes, failure_of
from service.transport.writer import Context

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_log = logging.getLogger(__name__)


class Guard(Protocol):
    """Says who calls."""

    def authorize(self, metadata: Metadata, right: Right) -> Caller: ...

    def tenants(self) -> frozenset[str]:
        """Everybody who may call."""

    def reload(self) -> None:
        """Reads again what that stands in, soon."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a body may know of its RPC, besides the message."""

    context: Context
    origin: Origin


UnaryBody = Callable[[bytes, Call], Awaitable[bytes]]
StreamBody = Callable[[bytes, Call], Awaitable[None]]


class Endpoints:
    """Makes handlers out of bodies."""

    def __init__(self, guard: Guard, resources: ResourceTypes) -> None:
        self._guard = guard
        self._resources = resources

    def unary(self, right: Right, body: UnaryBody) -> grpc.RpcMethodHandler[bytes, bytes]:
        """A body that returns its one response."""

        async def handle(data: bytes, context: Context) -> bytes:
            try:
                response = await body(data, self._call(right, context))
                if len(response) > MAX_MESSAGE_BYTES:
                    raise AnswerTooLarge(f"the response is larger than {MAX_MESSAGE_BYTES} bytes")
                return response
            except Exception as error:
                await abort_with(error, context, self._resources)

        return grpc.unary_unary_rpc_method_handler(handle)

    def stream(self, right: Right, body: StreamBody) -> grpc.RpcMethodHandler[bytes, bytes]:
        """A body that writes its responses to the context."""

        async def handle(data: bytes, context: Context) -> None:
            try:
                await body(data, self._call(right, context))
            except Exception as error:
                await abort_with(error, context, self._resources)

        return grpc.unary_stream_rpc_method_handler(handle)

    def _call(self, right: Right, context: Context) -> Call:
        now = time.monotonic()
        remaining = context.time_remaining()
        caller = self._guard.authorize(context.invocation_metadata() or (), right)
        deadline = None if remaining is None else now + remaining
        return Call(context, Origin(caller.tenant, now, deadline, caller.name))


async def abort_with(error: Exception, context: Context, resources: ResourceTypes | None = None) -> NoReturn:
    """Ends the RPC. Where gRPC could not write any more, the caller has gone, and it has ended already."""
    if isinstance(error, grpc.aio.InternalError):
        raise asyncio.CancelledError from error
    if isinstance(error, grpc.aio.BaseError):
        raise error
    failure = failure_of(error, resources)
    if failure.code is grpc.StatusCode.INTERNAL:
        # Where it happened, not what it says: the text of a foreign exception may hold a prompt.
        frames = "".join(traceback.format_tb(error.__traceback__))
        _log.error("%s answered as INTERNAL\n%s", type(error).__name__, frames.rstrip())
    try:
        await context.abort(failure.code, failure.message, failure.trailers)
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError from gone


def service(
    name: str, methods: Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]
) -> grpc.GenericRpcHandler[bytes, bytes]:
    """All methods of a service."""
    return grpc.method_handlers_generic_handler(name, dict(methods))
