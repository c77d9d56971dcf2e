"""An engine process that is killed again and again under full load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from service.pb.whippet.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.conftest import PATIENCE, Server, ask, ask_stream

pytestmark = pytest.mark.proof

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
KILLS, MANY = 20, 50
FEW = pb.DeliveryOptions(max_tokens_per_message=1000, max_delay=Duration(nanos=50_000_000))  # messages


class Client:
    """Streams that run and requests that wait behind them."""

    def __init__(self, server: Server, channel: grpc.aio.Channel, admin: grpc.aio.Channel) -> None:
        self._server = server
        self._stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(admin)

    async def short(self, number: int) -> str:
        return str((await self._stub.Generate(ask(f"short {number}", 5), timeout=PATIENCE)).text)

    async def round(self, expected: list[str]) -> None:
        """A kill under streams that have a token and requests that have none."""
        calls = [
            self._stub.GenerateStream(ask_stream(f"long {n}", 4000, delivery=FEW), timeout=PATIENCE)
            for n in range(MANY)
        ]
        begun = await asyncio.gather(*[self._first_token(call) for call in calls])
        waiting = [asyncio.ensure_future(self.short(number)) for number in range(MANY)]
        while (await self._admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=PATIENCE)).waiting < MANY:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        os.kill(self._server.engine_pid(), signal.SIGKILL)
        ends = await asyncio.gather(*[self._rest(call) for call in calls])
        assert all(begun)
        assert ends == [(grpc.StatusCode.UNAVAILABLE, True)] * MANY
        assert await asyncio.gather(*waiting) == expected

    @staticmethod
    async def _first_token(call: grpc.aio.UnaryStreamCall[object, pb.GenerateStreamResponse]) -> str:
        async for message in call:
            if message.text:
                return str(message.text)
        raise AssertionError("it ended without a token")

    @staticmethod
    async def _rest(
        call: grpc.aio.UnaryStreamCall[object, pb.GenerateStreamResponse],
    ) -> tuple[grpc.StatusCode, bool]:
        """The one end that a stream has, and whether it says when to come again."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for message in call:
                assert not message.HasField("finish")
        return await call.code(), "grpc-retry-pushback-ms" in dict(await call.trailing_metadata() or ())


@pytest.mark.timeout(900)
async def test_twenty_kills_under_fifty_streams_and_fifty_that_wait(serve: Serve) -> None:
    """The server lives on, each stream ends once and says when to come again, and whoever waited gets the answer that
    an undisturbed engine gives."""
    with serve(f"--scheduler.max-sequences={MANY}", "--fake.step-time=0.02") as server:
        async with (
            grpc.aio.insecure_channel(server.data) as channel,
            grpc.aio.insecure_channel(server.admin_address) as admin,
        ):
            client = Client(server, channel, admin)
            expected = [await client.short(number) for number in range(MANY)]
            for _ in range(KILLS):
                await client.round(expected)
            assert [await client.short(number) for number in range(MANY)] == expected
        load = server.idle()
        assert server.process.poll() is None
        assert load.running == load.waiting == 0
        assert server.stop() == 0
