"""Calls that are refused while their caller still writes: a client of grpc.aio shows the status, and no INTERNAL."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import grpc
import pytest

from tests.service.conftest import PATIENCE, Server

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
CALLS, AT_ONCE = 200, 20


@pytest.fixture(scope="module", params=[1, 2], ids=["one front", "two fronts"])
def guarded(request: pytest.FixtureRequest, serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Nobody who calls here has a token."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    digest = hashlib.sha256(b"sesame").hexdigest()
    tokens.write_text(f'[{{tenant: a, sha256: "{digest}", rights: [generate]}}]\n')
    with serve(f"--auth.tokens-file={tokens}", f"--server.fronts={request.param}") as one:
        yield one


@pytest.mark.parametrize(
    ("method", "code"),
    [
        (INFER, grpc.StatusCode.UNAUTHENTICATED),
        (REFLECTION, grpc.StatusCode.INVALID_ARGUMENT),
        ("/no.such.Service/Method", grpc.StatusCode.UNIMPLEMENTED),
    ],
)
async def test_every_refused_call_shows_its_status(guarded: Server, method: str, code: grpc.StatusCode) -> None:
    """Five messages each, which are no requests, in one go."""
    async with grpc.aio.insecure_channel(guarded.data) as channel:
        stream = cast(Any, channel).stream_stream(method)

        async def call() -> grpc.StatusCode:
            one = stream(iter([b"\xff" * 100] * 5), timeout=PATIENCE)
            with contextlib.suppress(grpc.RpcError):
                async for _ in one:
                    pass
            return cast(grpc.StatusCode, await one.code())

        found = Counter[grpc.StatusCode]()
        for _ in range(CALLS // AT_ONCE):
            found.update(await asyncio.gather(*(call() for _ in range(AT_ONCE))))
    assert found == {code: CALLS}


async def test_a_caller_that_keeps_its_stream_open_gets_its_status_all_the_same(guarded: Server) -> None:
    async with grpc.aio.insecure_channel(guarded.data) as channel:
        one = cast(Any, channel).stream_stream(INFER)(timeout=PATIENCE)
        await one.write(b"\xff")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await one.read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
