"""Around every RPC: who calls, its message, the size of the answer, and exception to status.

gRPC's own handlers of one message read it before any code of ours runs. Ours are all registered as if they took a
stream of messages, which looks the same on the wire: the caller is known first, and reading waits for its turn.
"""

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
from service.transport.inbox import Inbox
from service.transport.status import ResourceTypes, failure_of
from service.transport.writer import Context

MAX_ANSWER_BYTES = 16 * 1024 * 1024
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
    """What a body may know of its RPC."""

    context: Context
    origin: Origin
    message: Callable[[], Awaitable[bytes]]  # reads it; once


UnaryBody = Callable[[Call], Awaitable[bytes]]
StreamBody = Callable[[Call], Awaitable[None]]


class Endpoints:
    """Makes handlers out of bodies."""

    def __init__(self, guard: Guard, inbox: Inbox, resources: ResourceTypes) -> None:
        self._guard = guard
        self._inbox = inbox
        self._resources = resources

    def unary(self, right: Right, body: UnaryBody) -> grpc.RpcMethodHandler[bytes, bytes]:
        """A body that returns its one response."""

        async def handle(_: object, context: Context) -> bytes:
            try:
                origin = self._origin(right, context)
                with self._inbox.open(context, origin.tenant) as incoming:
                    response = await body(Call(context, origin, incoming.read))
                if len(response) > MAX_ANSWER_BYTES:
                    raise AnswerTooLarge(f"the response is larger than {MAX_ANSWER_BYTES} bytes")
                return response
            except Exception as error:
                await abort_with(error, context, self._resources)

        return grpc.stream_unary_rpc_method_handler(handle)

    def stream(self, right: Right, body: StreamBody) -> grpc.RpcMethodHandler[bytes, bytes]:
        """A body that writes its responses to the context."""

        async def handle(_: object, context: Context) -> None:
            try:
                origin = self._origin(right, context)
                with self._inbox.open(context, origin.tenant) as incoming:
                    await body(Call(context, origin, incoming.read))
            except Exception as error:
                await abort_with(error, context, self._resources)

        return grpc.stream_stream_rpc_method_handler(handle)

    def _origin(self, right: Right, context: Context) -> Origin:
        now = time.monotonic()
        remaining = context.time_remaining()
        caller = self._guard.authorize(context.invocation_metadata() or (), right)
        deadline = None if remaining is None else now + remaining
        return Origin(caller.tenant, now, deadline, caller.name)


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
    _forget_frames(error)
    try:
        await context.abort(failure.code, failure.message, failure.trailers)
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError from gone


def _forget_frames(error: BaseException | None) -> None:
    """Frames hold what the call held, its message above all, for as long as anything refers to the error: until the
    next full collection, since gRPC makes a cycle of it."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def service(
    name: str, methods: Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]
) -> grpc.GenericRpcHandler[bytes, bytes]:
    """All methods of a service."""
    return grpc.method_handlers_generic_handler(name, dict(methods))
