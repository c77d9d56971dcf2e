"""Two servers with one Redis are replaced one after the other, again and again, and no stream is lost: through Envoy,
and by clients that call the servers themselves and try again as a service config tells them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from bench.redis_server import RedisServer, free_port
from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1 import generation_pb2_grpc
from tests import envoy
from tests.service.conftest import PATIENCE, Server, ask_stream

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
STREAMS = 1000  # through each of the two ways, at least
CALLERS = 24  # each way
REPLACED = 4  # servers
SHORT, LONG = 16, 120  # tokens; some of the long ones outlast the delay
STEP = 0.01  # seconds
DELAY = 10 * envoy.CHECKED_EVERY
# What a client needs that is told where all servers are: it uses none that says NOT_SERVING, and tries again.
SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": envoy.READY},
    "methodConfig": [
        {
            "name": [{}],
            "waitForReady": True,
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}


class Fleet:
    """Two servers on ports that stay the same, each without a cache of its own."""

    def __init__(self, serve: Serve, *flags: str) -> None:
        self._serve = serve
        self._flags = flags
        ports = [free_port() for _ in range(6)]
        self._ports = [ports[:3], ports[3:]]
        self._stacks = [ExitStack(), ExitStack()]
        self._servers = [self._start(0), self._start(1)]
        self.backends = [envoy.Backend(data, health) for data, _, health in self._ports]
        self.replaced = 0

    def _start(self, which: int) -> Server:
        names = ("listen", "admin-listen", "health-listen")
        flags = [f"--{name}=127.0.0.1:{port}" for name, port in zip(names, self._ports[which], strict=True)]
        flags += [f"--fake.step-time={STEP}", f"--drain.delay={DELAY}", "--scheduler.max-sequences=64"]
        return self._stacks[which].enter_context(self._serve(*flags, *self._flags))

    def replace(self) -> None:
        """The one that has run for longer."""
        which = self.replaced % 2
        assert self._servers[which].stop() == 0, "a stream was cut off"
        self._stacks[which].close()
        self._servers[which] = self._start(which)
        self.replaced += 1

    def close(self) -> None:
        for stack in self._stacks:
            stack.close()


@pytest.fixture
def fleet(serve: Serve, redis_server: RedisServer, key_file: Path) -> Iterator[Fleet]:
    shared = (f"--cache.redis-url={redis_server.url}", f"--cache.key-file={key_file}")
    one = Fleet(serve, *shared, "--optimizations.response-cache=true")
    yield one
    one.close()


class Caller:
    """Calls again and again until told to stop; one call in five asks what others have asked before."""

    def __init__(self, channel: grpc.aio.Channel, ends: Counter[str]) -> None:
        self._stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self._ends = ends
        self.stopped = False

    async def run(self) -> None:
        while not self.stopped:
            count = self._ends.total()
            asked = ask_stream(f"x{count // 100}", LONG if count % 10 == 0 else SHORT)
            asked.delivery.max_tokens_per_message = 4
            if count % 5 == 1:
                asked.sampling.temperature = 0
            self._ends[await self._call(asked)] += 1

    async def _call(self, request: pb.GenerateStreamRequest) -> str:
        last = pb.GenerateStreamResponse()
        try:
            async for message in self._stub.GenerateStream(request, timeout=PATIENCE * 3):
                last = message
        except grpc.aio.AioRpcError as error:
            return f"{error.code()}: {error.details()}"
        if last.finish.usage.completion_tokens != request.stopping.max_tokens:
            return "cut short"
        return "stored" if last.finish.cache_source == pb.CACHE_SOURCE_RESPONSE else "generated"


async def test_no_stream_is_lost_while_servers_are_replaced(fleet: Fleet, tmp_path: Path) -> None:
    with envoy.running(tmp_path, fleet.backends) as proxy:
        direct = "ipv4:" + ",".join(f"127.0.0.1:{one.data}" for one in fleet.backends)
        ends: dict[str, Counter[str]] = {proxy.address: Counter(), direct: Counter()}
        options = (("grpc.service_config", json.dumps(SERVICE_CONFIG)), ("grpc.use_local_subchannel_pool", 1))
        async with contextlib.AsyncExitStack() as stack:
            callers = []
            for number in range(2 * CALLERS):
                address, how = ((proxy.address, ()), (direct, options))[number % 2]
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=how))
                callers.append(Caller(channel, ends[address]))
            tasks = [asyncio.create_task(caller.run()) for caller in callers]
            for _ in range(REPLACED):
                await asyncio.to_thread(fleet.replace)
                await asyncio.to_thread(proxy.until_healthy, 2)
            while min(one.total() for one in ends.values()) < STREAMS:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            for caller in callers:
                caller.stopped = True
            await asyncio.gather(*tasks)
        assert [set(one) for one in ends.values()] == [{"generated", "stored"}] * 2, ends
