"""Streams from a process of their own: a job a line in, what came of it a line out.

python -m bench.serving.caller ADDRESS TOKEN
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import msgspec
import uvloop
from google.rpc import error_details_pb2, status_pb2

from bench.serving.jobs import EndedRequest, JobResult, LoadJob, LoadRequest, bucket, ids_of, shared_out
from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1.generation_pb2_grpc import GenerationServiceStub
from service.transport.process.garbage import Garbage

_CONNECTIONS = 4
_BEHIND = 0.001  # seconds that are too few to sleep for
_UNTOLD = 0.1  # seconds until who was refused asks again, where the refusal does not say when
_END: Any = grpc.aio.EOF  # type: ignore[attr-defined]
Turns = Iterator[tuple[LoadRequest, pb.GenerateStreamRequest]]


def message(request: LoadRequest, job: LoadJob) -> pb.GenerateStreamRequest:
    """Makes a greedy request for exactly `tokens` tokens, straight from the model."""
    asked = pb.GenerateStreamRequest(text=request.text)
    if not request.text:
        asked.token_ids.ids.extend(ids_of(request, job.vocabulary))
    asked.stopping.max_tokens = request.tokens
    asked.stopping.ignore_eos = True
    asked.output.text = asked.output.token_ids = True
    asked.cache.response = asked.cache.semantic = pb.CACHE_MODE_OFF
    asked.cache.bypass_prefix = not request.blocks  # a trace is there for the prefixes that its prompts share
    asked.sampling.temperature = 0.0
    asked.priority = job.priority  # type: ignore[assignment]
    return asked


class LoadCaller:
    def __init__(self, address: str, token: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(_CONNECTIONS)]
        make: Any = GenerationServiceStub
        self._stubs: Iterator[Any] = itertools.cycle([make(channel) for channel in channels])
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._gaps: Counter[int] = Counter()
        self._tenths: Counter[int] = Counter()

    async def run(self, job: LoadJob) -> JobResult:
        """Runs the job to the end of the last stream."""
        self._gaps, self._tenths = Counter(), Counter()
        cpu, ended = time.process_time(), list[EndedRequest]()
        if job.streams:
            turns = _once(job) if job.until is None else _again_and_again(job)
            await asyncio.gather(*[self._one_after_the_other(job, turns, ended) for _ in range(job.streams)])
        else:
            async with asyncio.TaskGroup() as asked:
                for request in sorted(job.requests, key=_due):
                    await _sleep_until(job.begin + _due(request))
                    came = EndedRequest(job.begin + _due(request), time.monotonic(), wanted=request.tokens)
                    asked.create_task(self._ask(message(request, job), job, came, ended))
        return JobResult(ended, dict(self._gaps), dict(self._tenths), time.process_time() - cpu)

    async def _one_after_the_other(self, job: LoadJob, turns: Turns, ended: list[EndedRequest]) -> None:
        await _sleep_until(job.begin)
        for request, asked in turns:
            if job.until is not None and time.monotonic() >= job.until:
                return
            came = await self._ask(
                asked, job, EndedRequest(time.monotonic(), time.monotonic(), wanted=request.tokens), ended
            )
            if came.code != "OK" and job.until is not None:
                again = time.monotonic() + (came.retry or _UNTOLD)
                await _sleep_until(min(again, job.until))

    async def _ask(
        self, asked: pb.GenerateStreamRequest, job: LoadJob, came: EndedRequest, ended: list[EndedRequest]
    ) -> EndedRequest:
        call = next(self._stubs).GenerateStream(asked, metadata=self._metadata, timeout=job.patience)
        try:
            while (answer := await call.read()) is not _END:
                self._take(came, answer, job.begin)
            came.code = (await call.code()).name
        except grpc.aio.AioRpcError as error:
            came.code, came.retry = error.code().name, _says_when(error)
        came.ended = time.monotonic()
        ended.append(came)
        return came

    def _take(self, came: EndedRequest, answer: pb.GenerateStreamResponse, begin: float) -> None:
        came.late = came.late or came.finishes > 0
        count = len(answer.token_ids)
        if count:
            now = time.monotonic()
            if came.messages:
                self._gaps[bucket(now - came.last)] += 1
            else:
                came.first = now
            came.last = now
            came.tokens += count
            came.messages += 1
            self._tenths[int((now - begin) * 10)] += count
        if answer.HasField("finish"):
            came.finishes += 1


def _due(request: LoadRequest) -> float:
    return request.at or 0.0


def _once(job: LoadJob) -> Turns:
    """Makes messages beforehand, so that all streams can begin together."""
    return iter([(request, message(request, job)) for request in job.requests])


def _again_and_again(job: LoadJob) -> Turns:
    """Repeats the job, each turn with prompts of its own."""
    step = max(request.number for request in job.requests) + 1
    for turn in itertools.count():
        for request in job.requests:
            fresh = msgspec.structs.replace(request, number=request.number + turn * step)
            yield fresh, message(fresh, job)


async def _sleep_until(at: float) -> None:
    left = at - time.monotonic()
    if left > _BEHIND:
        await asyncio.sleep(left)


def _says_when(error: grpc.aio.AioRpcError) -> float | None:
    """Returns the seconds until a retry, where the details have them."""
    trailers: Any = error.trailing_metadata() or ()
    data = dict(trailers).get("grpc-status-details-bin")
    if data is None:
        return None
    retry_info = error_details_pb2.RetryInfo()
    given_hint = any(one.Unpack(retry_info) for one in status_pb2.Status.FromString(data).details)
    return retry_info.retry_delay.ToMilliseconds() / 1000 if given_hint else None


async def _serve(address: str, token: str) -> None:
    garbage = asyncio.create_task(Garbage().run(lambda: 1))  # as a server: its own pauses are not to be measured
    caller, loop = LoadCaller(address, token), asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.buffer.readline):
        found = await caller.run(msgspec.json.decode(line, type=LoadJob))
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        sys.stdout.buffer.flush()
    garbage.cancel()
    os._exit(0)  # channels of a server that is gone have nothing to say


_LEAD = 0.3  # seconds between telling a job and its beginning


class Crew:
    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def __len__(self) -> int:
        return len(self._processes)

    def warm(self, vocabulary: int) -> None:
        """Opens their connections, with answers that are not counted."""
        self.together(
            [LoadJob(time.monotonic(), [LoadRequest(n, 4, 2) for n in range(8)], 4, vocabulary=vocabulary)] * len(self)
        )

    def run(self, job: LoadJob) -> list[JobResult]:
        return self.together(shared_out(job, len(self)))

    def together(self, jobs: Sequence[LoadJob]) -> list[JobResult]:
        """Runs the jobs at once, a process each."""
        retry_info = list(zip(self._processes, jobs, strict=False))
        for process, job in retry_info:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
        return [_answer(process) for process, _ in retry_info]


def _answer(process: subprocess.Popen[bytes]) -> JobResult:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a calling process ended before its answer")
    return msgspec.json.decode(line, type=JobResult)


def soon() -> float:
    """Returns the time when a job that is sent now may begin."""
    return time.monotonic() + _LEAD


@contextmanager
def crew(address: str, token: str, processes: int) -> Iterator[Crew]:
    """Starts `processes` processes; they end with the block."""
    words = [sys.executable, "-m", "bench.serving.caller", address, token]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(processes):
            started.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        yield Crew(started)
    finally:
        for process in started:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    uvloop.run(_serve(*sys.argv[1:]))
