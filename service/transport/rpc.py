"""Around every RPC: bytes to message, who calls, and exception to status. Bodies see none of it.

Requests are parsed here and not by gRPC, which would answer INTERNAL for bytes that are no message.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from service.core.errors import AnswerTooLarge
from service.core.request import Origin
from service.protocols.whippet_v1.parse import decode
from service.protocols.whippet_v1.sink import Context
from service.transport.auth import Caller, Metadata, Right
from service.transport.status import failure_of

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_log = logging.getLogger(__name__)
_Request = TypeVar("_Request", bound=Message)


class Guard(Protocol):
    """Says who calls."""

    def authorize(self, metadata: Metadata, right: Right) -> Caller: ...

    def tenants(self) -> frozenset[str]:
        """Everybody who may call."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a body may know of its RPC, besides the message."""

    context: Context
    origin: Origin


class Endpoints:
    """Makes handlers out of bodies."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def unary(
        self, request: type[_Request], right: Right, body: Callable[[_Request, Call], Awaitable[Message]]
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        """A body that returns its one response."""

        async def handle(data: bytes, context: Context) -> bytes:
            try:
                response = await body(*self._open(request, right, data, context))
                if response.ByteSize() > MAX_MESSAGE_BYTES:
                    raise AnswerTooLarge(f"the response is larger than {MAX_MESSAGE_BYTES} bytes")
                return response.SerializeToString()
            except Exception as error:
                await abort_with(error, context)

        return grpc.unary_unary_rpc_method_handler(handle)

    def stream(
        self, request: type[_Request], right: Right, body: Callable[[_Request, Call], Awaitable[None]]
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        """A body that writes its responses to the context."""

        async def handle(data: bytes, context: Context) -> None:
            try:
                await body(*self._open(request, right, data, context))
            except Exception as error:
                await abort_with(error, context)

        return grpc.unary_stream_rpc_method_handler(handle)

    def _open(self, request: type[_Request], right: Right, data: bytes, context: Context) -> tuple[_Request, Call]:
        now = time.monotonic()
        remaining = context.time_remaining()
        caller = self._guard.authorize(context.invocation_metadata() or (), right)
        deadline = None if remaining is None else now + remaining
        return decode(request, data), Call(context, Origin(caller.tenant, now, deadline))


async def abort_with(error: Exception, context: Context) -> NoReturn:
    """Ends the RPC. Where gRPC could not write any more, the caller has gone, and it has ended already."""
    if isinstance(error, grpc.aio.InternalError):
        raise asyncio.CancelledError from error
    if isinstance(error, grpc.aio.BaseError):
        raise error
    failure = failure_of(error)
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
