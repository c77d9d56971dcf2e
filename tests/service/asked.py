"""Requests to a server with caches, and what it says where an answer came from."""

from __future__ import annotations

import time
from typing import Any

from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.conftest import PATIENCE, Server, ask


def greedy(text: str, tokens: int | None = 8, **fields: Any) -> pb.GenerateRequest:
    request = ask(text, tokens, **fields)
    if not request.sampling.HasField("temperature"):
        request.sampling.temperature = 0
    return request


def as_stream(request: pb.GenerateRequest) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest.FromString(request.SerializeToString())


def generate(server: Server, request: pb.GenerateRequest) -> tuple[pb.GenerateResponse, str]:
    response, call = server.generation.Generate.with_call(request, timeout=60)
    return response, str(dict(call.initial_metadata())["x-cache"])


def said(server: Server, request: pb.GenerateRequest) -> str:
    """The header alone."""
    return generate(server, request)[1]


def kept(server: Server, request: pb.GenerateRequest) -> None:
    """Waits until the answer is stored: that happens beside the request."""
    reading = pb.GenerateRequest.FromString(request.SerializeToString())
    reading.cache.response = pb.CACHE_MODE_READ
    end = time.monotonic() + PATIENCE
    while said(server, reading) != "hit-response":
        assert time.monotonic() < end, "never stored"
        time.sleep(0.01)


QUESTION, ALIKE = "How do I reset my password?", "how do i reset my password"


def chat(text: str, system: str = "", tokens: int = 64, **fields: Any) -> pb.GenerateRequest:
    """A greedy chat that stops by itself: answers cut by a limit are none for the semantic cache."""
    messages = [pb.ChatMessage(role="system", content=system)] if system else []
    messages.append(pb.ChatMessage(role="user", content=text))
    stops = pb.StoppingOptions(stop_token_ids=[101, 97, 116, 111, 110, 105], max_tokens=500)
    return greedy("", None, chat=pb.Chat(messages=messages), stopping=stops, **fields)


def loaded(server: Server) -> None:
    """Waits until the embedder is there."""
    end = time.monotonic() + PATIENCE
    while not server.load().cache_counts.get("semantic_lookup.empty", 0):
        said(server, chat(f"warm {time.monotonic():.3f} wood"))
        assert time.monotonic() < end, server.log.read_text()
        time.sleep(0.05)


def learnt(server: Server, request: pb.GenerateRequest) -> pb.GenerateResponse:
    """Asks, and waits until the answer is found by those who may read the semantic cache alone."""
    answer, _ = generate(server, request)
    assert answer.finish.reason == pb.FINISH_REASON_STOP
    reading = pb.GenerateRequest.FromString(request.SerializeToString())
    reading.cache.response, reading.cache.semantic = pb.CACHE_MODE_OFF, pb.CACHE_MODE_READ
    end = time.monotonic() + PATIENCE
    while said(server, reading) != "hit-semantic":
        assert time.monotonic() < end
        time.sleep(0.02)
    return answer


def probe(text: str, system: str = "", **fields: Any) -> pb.GenerateRequest:
    """Reads, and leaves nothing behind."""
    request = chat(text, system, **fields)
    request.cache.response, request.cache.semantic = pb.CACHE_MODE_READ, pb.CACHE_MODE_READ
    return request


def generated(server: Server) -> int:
    return int(server.idle().generated_tokens)
