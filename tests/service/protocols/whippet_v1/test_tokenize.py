"""Tokenize and Detokenize are let in like any request."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import grpc
import pytest

from service.pb.whippet.v1 import admin_pb2
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.conftest import Server, ask_stream, refused
from tests.service.tenants import metadata, write_tokens

pytestmark = pytest.mark.product

Serve = Callable[..., AbstractContextManager[Server]]
TEXT = pb.TokenizeRequest(text="x")
LONG = pb.TokenizeRequest(text="long " * 10_000)
IDS = pb.DetokenizeRequest(token_ids=[1])


def test_they_count_for_the_tenants_quota(serve: Serve, tmp_path: Path) -> None:
    with serve(
        f"--auth.tokens-file={write_tokens(tmp_path)}", "--limits.tenant-requests=1", "--fake.step-time=0.01"
    ) as server:
        held = server.generation.GenerateStream(ask_stream("x", 3000), metadata=metadata("acme"), timeout=60)
        next(held)
        for call, request in (
            (server.generation.Tokenize, TEXT),
            (server.generation.Tokenize, LONG),
            (server.generation.Detokenize, IDS),
        ):
            refusal = refused(call, request, metadata=metadata("acme"))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_QUOTA")
            assert refusal.retry_ms > 0
            call(request, metadata=metadata("bravo"), timeout=60)
        held.cancel()


def test_a_draining_server_refuses_them(serve: Serve) -> None:
    with serve() as server:
        assert len(server.generation.Tokenize(LONG, timeout=60).token_ids) == len(LONG.text)
        server.admin.Drain(admin_pb2.DrainRequest(), timeout=60)
        for call, request in ((server.generation.Tokenize, TEXT), (server.generation.Detokenize, IDS)):
            refusal = refused(call, request)
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


def test_a_text_that_is_too_large_is_refused_before_it_is_tokenized(serve: Serve) -> None:
    large = "x" * (2 * 2**20 + 1)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=large[: 2**20])] * 2)
    with serve() as server:
        for call, request in (
            (server.generation.Tokenize, pb.TokenizeRequest(text=large)),
            (server.generation.Tokenize, pb.TokenizeRequest(text="é" * 2**20 + "x")),
            (server.generation.Tokenize, pb.TokenizeRequest(chat=chat)),
            (server.generation.Generate, pb.GenerateRequest(chat=chat)),
        ):
            refusal = refused(call, request)
            assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
            assert "is larger than 2097152 bytes" in refusal.message
