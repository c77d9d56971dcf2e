"""Runs callers in a process of their own, as many as its standard input asks for, which retry when a refusal permits.

    python -m tests.timing.retrying_callers ADDRESS TOKEN TOKENS

A line with a number sets how many call from then on; `report` prints one line of JSON of all calls since the last one.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from service.pb.whippet.v1 import generation_pb2, generation_pb2_grpc

_PER_CONNECTION = 100  # calls
_FIRST = 4.0  # seconds over which those who are new begin
_RETRY = "grpc-retry-pushback-ms"


class StreamCallers:
    """Requests one stream after the other from each caller, of `tokens` tokens."""

    def __init__(self, address: str, token: str, tokens: int) -> None:
        self._address = address
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._tokens = tokens
        self._stubs: list[generation_pb2_grpc.GenerationServiceStub] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._new()

    def _new(self) -> None:
        self.codes: Counter[str] = Counter()
        self.refused: list[float] = []  # seconds that each took
        self.first: list[float] = []  # seconds until the first token

    def let(self, count: int) -> None:
        """Sets the number of callers; surplus calls are cancelled."""
        while len(self._tasks) > count:
            self._tasks.pop().cancel()
        new = count - len(self._tasks)
        for number in range(new):
            self._tasks.append(asyncio.create_task(self._call(len(self._tasks), _FIRST * number / new)))

    def report(self) -> dict[str, Any]:
        """Reports the calls that have ended since the last report."""
        report = {"codes": self.codes, "refused": sorted(self.refused), "first": sorted(self.first)}
        self._new()
        return report

    def _stub(self, number: int) -> generation_pb2_grpc.GenerationServiceStub:
        while len(self._stubs) <= number // _PER_CONNECTION:
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
            channel = grpc.aio.insecure_channel(self._address, options=options)
            self._stubs.append(generation_pb2_grpc.GenerationServiceStub(channel))  # type: ignore[no-untyped-call]
        return self._stubs[number // _PER_CONNECTION]

    async def _call(self, number: int, delay: float) -> None:
        stub = self._stub(number)
        request = generation_pb2.GenerateStreamRequest(text=f"caller {number}")
        request.stopping.max_tokens = self._tokens
        await asyncio.sleep(delay)
        while True:
            begun = time.perf_counter()
            first = None
            try:
                async for _ in stub.GenerateStream(request, metadata=self._metadata, timeout=120):
                    if first is None:
                        first = time.perf_counter() - begun
                        self.first.append(first)
                self.codes["OK"] += 1
            except grpc.aio.AioRpcError as error:
                self.codes[error.code().name] += 1
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and first is None:
                    self.refused.append(time.perf_counter() - begun)
                trailers: Any = error.trailing_metadata() or ()
                await asyncio.sleep(int(dict(trailers).get(_RETRY, "1000")) / 1000)


class CallerProcess:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def let(self, count: int) -> None:
        self._say(str(count))

    def report(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        self._say("report")
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()


@contextmanager
def callers(address: str, token: str, tokens: int) -> Iterator[CallerProcess]:
    """Yields a process without callers yet; it ends with the block."""
    words = [sys.executable, "-m", "tests.timing.retrying_callers", address, token, str(tokens)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield CallerProcess(process)
        finally:
            process.kill()


def share(values: list[float], part: float) -> float:
    """Returns the value that a share `part` of them do not exceed."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else 0.0


async def main(address: str, token: str, tokens: str) -> None:
    everybody = StreamCallers(address, token, int(tokens))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().strip():
        if line == "report":
            sys.stdout.write(json.dumps(everybody.report()) + "\n")
            sys.stdout.flush()
        else:
            everybody.let(int(line))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
