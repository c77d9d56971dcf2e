"""Implements the client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar, Unpack, cast

import grpc
from grpc import aio

from whippet_client.endpoint import MOST_ATTEMPTS, ChannelOption, Endpoint, Token
from whippet_client.errors import error_of
from whippet_client.pb.whippet.v1 import generation_pb2 as pb
from whippet_client.pb.whippet.v1 import model_pb2
from whippet_client.pb.whippet.v1.generation_pb2_grpc import GenerationServiceStub
from whippet_client.pb.whippet.v1.model_pb2_grpc import ModelServiceStub
from whippet_client.requests import (
    ChatOptions,
    Message,
    Options,
    Prompt,
    generate_request,
    stream_request,
    tokenize_request,
)

_T = TypeVar("_T")


class AsyncStream(AsyncIterator[pb.GenerateStreamResponse]):
    """An answer as it is generated. If you do not read it to its end, leave it through `async with`, or call `cancel`:
    otherwise the server keeps generating."""

    def __init__(self, call: aio.UnaryStreamCall[pb.GenerateStreamRequest, pb.GenerateStreamResponse]) -> None:
        self._call = call
        self._cancelled = False
        self.prompt_info: pb.PromptInfo | None = None  # with the first message
        self.finish: pb.Finish | None = None  # of the first answer: why it ended, usage, timings

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> pb.GenerateStreamResponse:
        """Raises WhippetError, at once or after any number of messages."""
        try:
            message = await self._call.read()
        except aio.AioRpcError as error:
            raise error_of(cast(grpc.Call, error)) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._cancelled and not (task and task.cancelling()):
                raise StopAsyncIteration from None
            raise
        if not isinstance(message, pb.GenerateStreamResponse):  # aio.EOF
            raise StopAsyncIteration
        if message.HasField("prompt_info"):
            self.prompt_info = message.prompt_info
        if message.HasField("finish") and not message.index:
            self.finish = message.finish
        return message

    async def text(self) -> str:
        """Returns the remaining text, whole; of several answers, that of the first."""
        return "".join([message.text async for message in self if not message.index])

    async def initial_metadata(self) -> dict[str, str]:
        """Returns `x-request-id` and `x-cache`, which come with the first message."""
        return {key: value for key, value in await self._call.initial_metadata() if isinstance(value, str)}

    def cancel(self) -> None:
        """Ends it: the server stops generating, and iteration ends."""
        self._cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncClient:
    """Holds one channel to a server. Make it where an event loop runs."""

    def __init__(
        self,
        address: str,
        *,
        token: Token | None = None,
        ca: Path | str | None = None,
        cert: Path | str | None = None,
        key: Path | str | None = None,
        tls: bool = False,
        insecure: bool = False,
        timeout: float | None = None,
        attempts: int = MOST_ATTEMPTS,
        options: Sequence[ChannelOption] = (),
    ) -> None:
        """`timeout`: seconds of each call that names none of its own. Raises ValueError, or OSError of a file."""
        self._endpoint = Endpoint(address, token, ca, cert, key, tls, insecure, attempts)
        self._timeout = timeout
        credentials, every = self._endpoint.credentials(), self._endpoint.options(options)
        self._channel = (
            aio.insecure_channel(address, every)
            if credentials is None
            else aio.secure_channel(address, credentials, every)
        )
        self._generation = GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._models = ModelServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> pb.GenerateResponse:
        """Returns the whole answer. Raises WhippetError, as every call does."""
        request = generate_request(prompt, **options)
        return await _answer(self._generation.Generate(request, **self._call_options(timeout)))

    async def chat(
        self, messages: Sequence[Message], *, timeout: float | None = None, **options: Unpack[Options]
    ) -> pb.GenerateResponse:
        """Returns the whole answer to a conversation, oldest message first."""
        return await self.generate(messages, timeout=timeout, **options)

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> AsyncStream:
        """Streams the answer to a text, ids or a conversation as it is generated."""
        request = stream_request(generate_request(prompt, **options))
        return AsyncStream(self._generation.GenerateStream(request, **self._call_options(timeout)))

    async def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """Returns the ids that the model would be given."""
        request = tokenize_request(prompt, model, **options)
        response: pb.TokenizeResponse = await _answer(self._generation.Tokenize(request, **self._call_options(timeout)))
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout: float | None = None) -> str:
        """Returns the text of the ids."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        response: pb.DetokenizeResponse = await _answer(
            self._generation.Detokenize(request, **self._call_options(timeout))
        )
        return response.text

    async def models(self, *, timeout: float | None = None) -> list[model_pb2.Model]:
        """Lists the models that the server serves."""
        request = model_pb2.ListModelsRequest()
        response: model_pb2.ListModelsResponse = await _answer(
            self._models.ListModels(request, **self._call_options(timeout))
        )
        return list(response.models)

    async def close(self) -> None:
        """Cancels what is live."""
        await self._channel.close(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _call_options(self, timeout: float | None) -> dict[str, object]:
        return {"timeout": self._timeout if timeout is None else timeout, "metadata": self._endpoint.metadata()}


async def _answer(call: Awaitable[_T]) -> _T:
    try:
        return await call
    except aio.AioRpcError as error:
        raise error_of(cast(grpc.Call, error)) from None
