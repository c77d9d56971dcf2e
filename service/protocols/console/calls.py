"""Calls gRPC methods over HTTP: JSON in, lines of JSON out. The method's handler gets a Context like any other, so that
identity, rights, quotas and statuses are as over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, cast

import grpc
import msgspec
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message

from service.core.errors import InvalidRequest, Violation
from service.pb.whippet.v1 import admin_pb2, generation_pb2
from service.protocols.whippet_v1.rights import ADMIN, GENERATION
from service.transport.call.context import Context, Trailers
from service.transport.call.errors import forget_frames
from service.transport.port.http1 import Exchange, RequestRefused, head, response

JSON = "application/json"
LINES = "application/x-ndjson"
MAX_VALUES = 4096  # of one body, those in lists and objects included; some microseconds each on the event loop
_MAX_DEPTH = 16
_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
# Of every response: no other site may read, frame or cache it, and nothing in it is taken for a script.
SAFE: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_log = logging.getLogger(__name__)

Body = Callable[[object, Context], Awaitable[bytes | None]]


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    request: type[Message]
    response: type[Message]


ROUTES: Mapping[str, Route] = {
    "/api/generate": Route(
        f"/{GENERATION}/GenerateStream", generation_pb2.GenerateStreamRequest, generation_pb2.GenerateStreamResponse
    ),
    "/api/switch": Route(
        f"/{ADMIN}/SetOptimization", admin_pb2.SetOptimizationRequest, admin_pb2.SetOptimizationResponse
    ),
}


class ConsoleCallDetails(NamedTuple):
    """Has the fields of grpc.HandlerCallDetails."""

    method: str
    invocation_metadata: tuple[tuple[str, str], ...]


class ConsoleCredentials:
    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        given = self.exchange.request.headers.get("authorization")
        return () if given is None else (("authorization", given),)

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return self.exchange.names


class HttpCall(ConsoleCredentials):
    def __init__(self, exchange: Exchange, route: Route) -> None:
        super().__init__(exchange)
        self._route = route
        self._code: grpc.StatusCode | None = None
        self._begun = False  # whether the head of the response was written
        self._unread = True
        self.received = asyncio.Event()  # once nothing of the request is to come any more

    def peer(self) -> str:
        return self.exchange.peer

    def time_remaining(self) -> float | None:
        return None

    def code(self) -> grpc.StatusCode | None:
        return self._code

    async def read(self) -> object:
        if not self._unread:
            return None
        return parsed(self._route.request, await self.body())

    async def body(self) -> bytes:
        self._unread = False
        try:
            return await self.exchange.body()
        except (RequestRefused, asyncio.IncompleteReadError) as error:
            raise _wrong(str(error) if isinstance(error, RequestRefused) else "the body is cut") from None
        finally:
            self.received.set()

    async def drain(self) -> None:
        """Reads what the client still sends: else closing the connection could destroy the response on its way."""
        if self._unread:
            with contextlib.suppress(InvalidRequest):
                await self.body()

    async def write(self, message: bytes, /) -> None:
        reply = MessageToDict(self._route.response.FromString(message), preserving_proto_field_name=True)
        await self._write(reply)

    async def send_initial_metadata(self, metadata: tuple[tuple[str, str], ...], /) -> None:
        self._begin(dict(metadata))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailers: Trailers = (), /) -> NoReturn:
        self._code = code
        writer, error = self.exchange.writer, failure(code, details, trailers)
        if self._begun:
            writer.write(_line({"error": error}))
        else:
            self._begun = True
            writer.write(refusal(code, error))
        raise grpc.aio.AbortError

    async def _write(self, reply: object) -> None:
        writer = self.exchange.writer
        if writer.is_closing():
            raise grpc.aio.InternalError("the client has gone")
        self._begin({})
        writer.write(_line(reply))
        try:
            await writer.drain()
        except OSError:  # it has gone meanwhile
            raise grpc.aio.InternalError("the client has gone") from None

    def _begin(self, headers: Mapping[str, str]) -> None:
        if not self._begun:
            self._begun = True
            self.exchange.writer.write(head(200, {"Content-Type": LINES, **SAFE, **headers}))


class ConsoleCalls:
    def __init__(self, handlers: Sequence[grpc.GenericRpcHandler[bytes, bytes]]) -> None:
        """`handlers` include those of the admin port."""
        self._handlers = tuple(handlers)

    async def run(self, exchange: Exchange, route: Route) -> None:
        """A client that goes away cancels the handler, as over gRPC."""
        call = HttpCall(exchange, route)
        body = self._body(ConsoleCallDetails(route.method, call.invocation_metadata()))
        exchange.hold()
        handling = asyncio.ensure_future(_handle(body, call))
        leaving = asyncio.ensure_future(_gone(call))
        try:
            await asyncio.wait((handling, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            handling.cancel()  # unless it has ended
            await asyncio.wait((handling, leaving))
            exchange.release()
        await call.drain()

    def _body(self, details: ConsoleCallDetails) -> Body:
        found = next(
            method
            for handler in self._handlers
            if (method := handler.service(cast(grpc.HandlerCallDetails, details))) is not None
        )
        return cast(Body, found.stream_stream if found.response_streaming else found.stream_unary)


async def _handle(body: Body, call: HttpCall) -> None:
    try:
        answer = await body(None, call)
        if answer is not None:
            await call.write(answer)
    except grpc.aio.AbortError as aborted:
        asyncio.get_running_loop().call_soon(forget_frames, aborted)
    except grpc.aio.InternalError:  # the client has gone
        call.exchange.writer.transport.abort()
    except Exception as error:
        _log.error("a handler raised %s", type(error).__name__)
        call.exchange.writer.transport.abort()


async def _gone(call: HttpCall) -> None:
    await call.received.wait()
    await call.exchange.gone()


def parsed(kind: type[Message], body: bytes) -> bytes:
    """Converts JSON to a message's bytes. Raises InvalidRequest, also for too many values."""
    try:
        tree = msgspec.json.decode(body, type=dict[str, object])
        if sum(1 for _ in _values(tree)) > MAX_VALUES:
            raise _wrong(f"the body has more than {MAX_VALUES} values")
        message: Message = ParseDict(tree, kind(), max_recursion_depth=_MAX_DEPTH)
        return message.SerializeToString()
    except (ParseError, msgspec.DecodeError, RecursionError, ValueError, TypeError, AttributeError) as error:
        raise _wrong(f"the body is no {kind.DESCRIPTOR.full_name} in JSON: {error}"[:300]) from None


def _values(tree: object) -> Iterator[object]:
    todo, count = [tree], 0
    while todo and count <= MAX_VALUES:
        value = todo.pop()
        count += 1
        yield value
        if isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, list):
            todo.extend(value)


def _wrong(description: str) -> InvalidRequest:
    return InvalidRequest((Violation("", description),))


def failure(code: grpc.StatusCode, details: str, trailers: Trailers) -> Mapping[str, object]:
    found: dict[str, object] = {"code": code.name, "message": details}
    for name, value in trailers:
        if name == "grpc-retry-pushback-ms" and isinstance(value, str):
            found["retry_ms"] = int(value)
    return found


def refusal(code: grpc.StatusCode, error: Mapping[str, object]) -> bytes:
    status = _STATUSES.get(code, 500)
    known = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return response(status, JSON, msgspec.json.encode({"error": error}), headers={**SAFE, **known})


def _line(reply: object) -> bytes:
    return msgspec.json.encode(reply) + b"\n"
