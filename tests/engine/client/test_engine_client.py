"""The client with a real engine process that runs the fake."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from msgspec import structs

from engine.api import (
    Engine,
    EngineState,
    FinishReason,
    GenerationRequest,
    ModelInfo,
    Priority,
    Stopping,
    TokenStream,
    Unused,
)
from engine.client.engine_client import EngineClient, check
from engine.errors import DeadlineExceeded, EngineFailed, EngineUnavailable, Unsupported
from engine.fake import FakeRunner, Fault, plain_request
from engine.settings import EngineSettings, FakeSettings
from tests.waiting import until

PATIENCE = 60.0  # seconds after which a test that waits has failed


@asynccontextmanager
async def running(sequences: int = 16, *, stream_buffer: int = 1 << 18, **fake: object) -> AsyncIterator[EngineClient]:
    settings = EngineSettings(
        model="",
        kind="fake",
        max_sequences=sequences,
        fake=FakeSettings(faults=True, **fake),  # type: ignore[arg-type]
    )
    client = EngineClient(settings, stream_buffer=stream_buffer)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def ids_of(stream: TokenStream) -> list[int]:
    return [token_id async for events in stream for token_id in events.token_ids]


def prompt(number: int) -> tuple[int, ...]:
    return tuple(b"a prompt, namely number %d" % number)


def memory(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.product
async def test_it_starts_answers_and_stops() -> None:
    settings = EngineSettings(model="", kind="fake")
    client = EngineClient(settings)
    engine: Engine = client
    assert engine.state is EngineState.STOPPED
    with pytest.raises(EngineUnavailable):
        client.submit(plain_request((1,)))
    await client.start()
    assert client.state is EngineState.READY
    assert client.info is not None
    plain = FakeRunner(settings).info
    redis = Unused(name="prefix_redis", reason="cache.redis-url and cache.key-file are not both set")
    assert client.info == dataclasses.replace(plain, unused=(*plain.unused, redis))
    pid = client.pid
    assert pid is not None
    last = [events async for events in client.submit(plain_request((1, 2, 3), 40))][-1]
    assert last.finish is not None
    assert last.finish.reason is FinishReason.LENGTH
    await client.close()
    await client.close()
    assert client.state is EngineState.STOPPED
    assert client.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    for call in (lambda: client.submit(plain_request((1,))), lambda: client.set_optimization("batching", True)):
        with pytest.raises(EngineUnavailable) as caught:
            await call()  # type: ignore[misc]
        assert caught.value.retry_after > 0


@pytest.mark.product
async def test_closing_ends_what_runs() -> None:
    async with running(step_time=0.01) as client:
        stream = client.submit(plain_request((1,), 4000))
        await anext(stream)
        reader = asyncio.create_task(ids_of(stream))
        await asyncio.sleep(0.02)
    with pytest.raises(EngineUnavailable):
        await reader
    assert client.live == 0


@pytest.mark.product
async def test_answers_do_not_depend_on_company() -> None:
    async with running(sequences=4, total_pages=40, max_context=600) as client:
        alone = [await ids_of(client.submit(plain_request(prompt(number), 60))) for number in range(12)]
        requests = [plain_request(prompt(number), 60, priority=Priority(number % 3)) for number in range(12)]
        together = await asyncio.gather(*[ids_of(client.submit(request)) for request in requests])
        assert together == alone
        await client.set_optimization("batching", False)
        assert await asyncio.gather(*[ids_of(client.submit(request)) for request in requests]) == alone
        with pytest.raises(Unsupported, match="warp"):
            await client.set_optimization("warp", False)
        await until(lambda: client.load.running == client.load.used_pages == 0)
        assert client.live == 0


@pytest.mark.product
def test_it_runs_on_uvloop() -> None:
    async def main() -> list[int]:
        async with running() as client:
            return await ids_of(client.submit(plain_request(prompt(1), 30)))

    assert len(uvloop.run(main())) == 30


@pytest.mark.product
async def test_time_limits_hold_running_and_waiting() -> None:
    async with running(sequences=1, step_time=0.005) as client:
        first = client.submit(plain_request(prompt(0), 4000))
        await anext(first)
        now = time.monotonic()
        waiting_late = client.submit(plain_request(prompt(1), deadline=now + 0.2))
        waiting_over = client.submit(plain_request(prompt(2), expires_at=now + 0.2))
        with pytest.raises(DeadlineExceeded):
            await ids_of(waiting_late)
        events = await anext(waiting_over)
        assert events.token_ids == ()
        assert events.finish is not None
        assert events.finish.reason is FinishReason.TIME_BUDGET
        assert 0.2 <= time.monotonic() - now < PATIENCE  # the first one takes as long
        first.cancel()
        now = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await ids_of(client.submit(plain_request(prompt(1), 4000, deadline=now + 0.2)))
        got = [events async for events in client.submit(plain_request(prompt(2), 4000, expires_at=now + 0.5))]
        assert got[-1].finish is not None
        assert got[-1].finish.reason is FinishReason.TIME_BUDGET
        assert 5 <= sum(len(events.token_ids) for events in got) <= 100
        await until(lambda: client.load.used_pages == 0)


@pytest.mark.product
async def test_a_reader_that_stops_pauses_its_sequence_and_nobody_else() -> None:
    async with running(stream_buffer=44 * 50) as client:
        stalled = client.submit(plain_request(prompt(1), 3000))
        first = await anext(stalled)
        await until(lambda: client.load.paused == 1)
        other = await ids_of(client.submit(plain_request(prompt(2), 3000)))
        assert len(other) == 3000
        await until(lambda: client.load.running == 0)
        assert client.load.paused == 1
        assert client.load.generated_tokens < 3000 + 2000, "the engine went on without its reader"
        rest = await ids_of(stalled)
        assert len(first.token_ids) + len(rest) == 3000
        await until(lambda: client.load.paused == client.load.used_pages == 0)


@pytest.mark.product
async def test_a_dropped_stream_leaves_nothing_in_the_engine() -> None:
    async with running(step_time=0.001) as client:
        stream = client.submit(plain_request(prompt(1), 4000))
        await anext(stream)
        del stream
        await until(lambda: client.live == 0 and client.load.used_pages == 0 and client.load.steps > 0)


@pytest.mark.product
async def test_a_broken_step_is_not_the_end_of_the_engine() -> None:
    async with running() as client:
        for _ in range(2):
            with pytest.raises(EngineFailed) as caught:
                await ids_of(client.submit(plain_request((0, Fault.RAISE, 5))))
            assert "as asked" not in str(caught.value), "what failed is for the log, not for the caller"
        assert len(await ids_of(client.submit(plain_request(prompt(1), 20)))) == 20
        assert client.restarts == 0


async def cycles(client: EngineClient, count: int) -> None:
    """Submits and cancels at all stages of a request: unread, while waiting, after some tokens."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            stream = client.submit(plain_request(prompt(number), 1000))
            for _ in range(number % 3):
                await anext(stream)
            stream.cancel()
            if number % 3 == 0:
                await asyncio.sleep(0)

    await asyncio.gather(*[work() for _ in range(100)])
    await until(lambda: client.load.running + client.load.waiting + client.load.used_pages == 0)


@pytest.mark.proof
async def test_ten_thousand_cancels_leave_nothing() -> None:
    async with running() as client:
        pids = (os.getpid(), client.pid or 0)
        await cycles(client, 3000)
        before = [memory(pid) for pid in pids]
        await cycles(client, 10_000)
        growth = [memory(pid) - size for pid, size in zip(pids, before, strict=True)]
        assert client.live == 0
        assert client.load.paused == 0
        assert client.restarts == 0
        assert len(await ids_of(client.submit(plain_request(prompt(1), 20)))) == 20
    assert max(growth) < 4 << 20, f"front and engine grew by {growth} bytes"


def changed(**changes: object) -> GenerationRequest:
    return structs.replace(plain_request((1,)), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (plain_request(()), "prompt"),
        (plain_request((1,) * 4096), "prompt"),
        (plain_request((1, -1)), "token_ids"),
        (plain_request((1, 256)), "token_ids"),
        (plain_request((1,), 0), "max_tokens"),
        (changed(stopping=Stopping(max_tokens=1, stop_token_ids=(256,))), "stop_token_ids"),
        (changed(sampling=structs.replace(plain_request((1,)).sampling, logit_bias=((-1, 1.0),))), "logit_bias"),
        (changed(sampling=structs.replace(plain_request((1,)).sampling, seed=1 << 64)), "seed"),
        (changed(sampling=structs.replace(plain_request((1,)).sampling, seed=-1)), "seed"),
    ],
)
def test_what_the_model_cannot_run_is_refused(request_: GenerationRequest, match: str) -> None:
    info: ModelInfo = FakeRunner(EngineSettings(model="", kind="fake")).info
    with pytest.raises(ValueError, match=match):
        check(request_, info)
    check(plain_request((0, 255) * 2047), info)
