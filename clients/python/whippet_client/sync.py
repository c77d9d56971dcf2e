"""Implements the client for threads. May be used by several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack, cast

import grpc

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


class Stream(Iterator[pb.GenerateStreamResponse]):
    """An answer as it is generated. If you do not read it to its end, leave it through `with`, or call `cancel`:
    otherwise the server keeps generating."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._cancelled = False
        self.prompt_info: pb.PromptInfo | None = None  # with the first message
        self.finish: pb.Finish | None = None  # of the first answer: why it ended, usage, timings

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> pb.GenerateStreamResponse:
        """Raises WhippetError, at once or after any number of messages."""
        try:
            message: pb.GenerateStreamResponse = next(self._call)
        except grpc.RpcError as error:
            if self._cancelled:
                raise StopIteration from None
            raise error_of(cast(grpc.Call, error)) from None
        if message.HasField("prompt_info"):
            self.prompt_info = message.prompt_info
        if message.HasField("finish") and not message.index:
            self.finish = message.finish
        return message

    def text(self) -> str:
        """Returns the remaining text, whole; of several answers, that of the first."""
        return "".join(message.text for message in self if not message.index)

    def initial_metadata(self) -> dict[str, str]:
        """Returns `x-request-id` and `x-cache`, which come with the first message."""
        return {key: value for key, value in self._call.initial_metadata() if isinstance(value, str)}

    def cancel(self) -> None:
        """Ends it, from any thread: the server stops generating, and iteration ends."""
        self._cancelled = True
        self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class Client:
    """Holds one channel to a server."""

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
            grpc.insecure_channel(address, every)
            if credentials is None
            else grpc.secure_channel(address, credentials, every)
        )
        self._generation = GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._models = ModelServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> pb.GenerateResponse:
        """Returns the whole answer. Raises WhippetError, as every call does."""
        response: pb.GenerateResponse = self._call(
            self._generation.Generate, generate_request(prompt, **options), timeout
        )
        return response

    def chat(
        self, messages: Sequence[Message], *, timeout: float | None = None, **options: Unpack[Options]
    ) -> pb.GenerateResponse:
        """Returns the whole answer to a conversation, oldest message first."""
        return self.generate(messages, timeout=timeout, **options)

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Stream:
        """Streams the answer to a text, ids or a conversation as it is generated."""
        request = stream_request(generate_request(prompt, **options))
        return Stream(self._call(self._generation.GenerateStream, request, timeout))

    def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """Returns the ids that the model would be given."""
        request = tokenize_request(prompt, model, **options)
        return list(self._call(self._generation.Tokenize, request, timeout).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout: float | None = None) -> str:
        """Returns the text of the ids."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        return str(self._call(self._generation.Detokenize, request, timeout).text)

    def models(self, *, timeout: float | None = None) -> list[model_pb2.Model]:
        """Lists the models that the server serves."""
        return list(self._call(self._models.ListModels, model_pb2.ListModelsRequest(), timeout).models)

    def close(self) -> None:
        """Cancels what is live."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Callable[..., Any], request: object, timeout: float | None) -> Any:
        seconds = self._timeout if timeout is None else timeout
        try:
            return method(request, timeout=seconds, metadata=self._endpoint.metadata())
        except grpc.RpcError as error:
            raise error_of(cast(grpc.Call, error)) from None
