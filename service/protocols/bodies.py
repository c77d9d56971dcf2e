"""Shares what every protocol does around a call's body: from checked bytes to a request, and back to headers and
messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from service.core.answers.delivery import AnswerMessage
from service.core.errors import InvalidRequest, Violation
from service.core.request import PromptFacts
from service.protocols.shape import check_shape
from service.transport.call.context import Context
from service.transport.call.rpc import Call, StreamBody, UnaryBody

_Message = TypeVar("_Message", bound=Message)
_Request = TypeVar("_Request")
_Response = TypeVar("_Response", bound=Message)


def decode(kind: type[_Message], data: bytes) -> _Message:
    """Raises InvalidRequest where the bytes are no such message, invalid UTF-8 included; gRPC would answer INTERNAL."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidRequest((Violation("", f"the bytes are no {kind.DESCRIPTOR.full_name}"),)) from None


def unary(
    kind: type[_Message], read: Callable[[_Message], _Request], body: Callable[[_Request, Call], Awaitable[Message]]
) -> UnaryBody:
    async def answer(call: Call) -> bytes:
        return (await body(await _received(kind, read, call), call)).SerializeToString()

    return answer


def streamed(
    kind: type[_Message], read: Callable[[_Message], _Request], body: Callable[[_Request, Call], Awaitable[None]]
) -> StreamBody:
    async def answer(call: Call) -> None:
        await body(await _received(kind, read, call), call)

    return answer


def as_it_is(message: _Message) -> _Message:
    """For a message small enough to be the request itself."""
    return message


async def _received(kind: type[_Message], read: Callable[[_Message], _Request], call: Call) -> _Request:
    """Neither bytes nor message outlive this call, so that their remainder costs no memory."""
    data = await call.message()
    check_shape(kind, data)
    return read(decode(kind, data))


async def send_headers(context: Context, prompt: PromptFacts) -> None:
    """Sends what is known before an answer, with its first part."""
    await context.send_initial_metadata((("x-request-id", prompt.request_id), ("x-cache", prompt.cache)))


class WholeOutlet(Generic[_Response]):
    def __init__(self, context: Context, render: Callable[[Sequence[AnswerMessage]], _Response]) -> None:
        self._context = context
        self._render = render
        self._messages: list[AnswerMessage] = []

    @property
    def response(self) -> _Response:
        """Complete once the answers have ended."""
        return self._render(self._messages)

    async def begin(self, prompt: PromptFacts) -> None:
        await send_headers(self._context, prompt)

    async def send(self, message: AnswerMessage) -> None:
        self._messages.append(message)
