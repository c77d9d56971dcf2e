"""Engine processes that die with requests in them: who waits outlives it, and who causes it is found."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from engine.client import EngineClient
from engine.errors import EngineUnavailable, Quarantined
from engine.fake import Fault, plain_request
from tests.engine.client.test_supervisor import ids_of, pid_of, running, until

pytestmark = pytest.mark.product

MATES = [(1, number) for number in range(2, 6)]


async def insistent(client: EngineClient, prompt: tuple[int, ...], tokens: int) -> tuple[list[int], int]:
    """As a client with a retry policy: what it gets in the end, and how often it was told to come again."""
    for times in range(1000):
        try:
            return await ids_of(client.submit(plain_request(prompt, tokens))), times
        except EngineUnavailable as error:
            await asyncio.sleep(min(error.retry_after, 0.02))
    raise AssertionError("never answered")


async def test_who_has_no_token_yet_outlives_the_process_with_the_same_answer() -> None:
    async with running() as client:
        alone = [await ids_of(client.submit(plain_request((2, number), 30))) for number in range(5)]
        await client.set_optimization("batching", False)
        stream = client.submit(plain_request((1,), 4000))
        await anext(stream)
        waiting = [asyncio.create_task(ids_of(client.submit(plain_request((2, number), 30)))) for number in range(5)]
        await until(lambda: client.load.waiting == 5)
        for restarts in (1, 2):
            os.kill(pid_of(client), signal.SIGKILL)
            if restarts == 1:
                with pytest.raises(EngineUnavailable):
                    await ids_of(stream)
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            await until(lambda restarts=restarts: client.restarts == restarts and client.pid is not None)
        assert await asyncio.gather(*waiting) == alone
        assert client.live == 0


@pytest.mark.proof
@pytest.mark.parametrize("after", [0, 7], ids=["first token", "eighth token"])
async def test_a_request_that_kills_is_refused_after_two_deaths_and_its_mates_never(after: int) -> None:
    async with running() as client:
        alone = [await ids_of(client.submit(plain_request(mate, 60))) for mate in MATES]
        together = [asyncio.create_task(insistent(client, mate, 60)) for mate in MATES]
        poison = asyncio.create_task(insistent(client, (0, Fault.CRASH, after), 60))
        with pytest.raises(Quarantined):
            await poison
        assert [ids for ids, _ in await asyncio.gather(*together)] == alone
        assert client.restarts == 2
        for _ in range(3):
            with pytest.raises(Quarantined):
                client.submit(plain_request((0, Fault.CRASH, after), 60))
        assert client.live == 0


@pytest.mark.proof
async def test_one_that_hangs_is_found_though_its_callers_give_up_early() -> None:
    async def impatient(client: EngineClient) -> None:
        while True:
            with contextlib.suppress(EngineUnavailable, TimeoutError):
                stream = client.submit(plain_request((0, Fault.HANG, 0)))
                try:
                    await asyncio.wait_for(anext(stream), 0.05)
                finally:
                    stream.cancel()
            await asyncio.sleep(0.05)

    async with running(hang_timeout=2.0) as client:
        with pytest.raises(Quarantined):
            await impatient(client)
        assert client.restarts <= 2


@pytest.mark.proof
async def test_processes_that_others_end_make_nobody_a_suspect() -> None:
    """Else an operator who kills engines would have requests refused that did no harm."""
    async with running() as client:
        for restarts in range(1, 4):
            stream = client.submit(plain_request((1, 2), 4000))
            await anext(stream)
            os.kill(pid_of(client), signal.SIGKILL)
            with pytest.raises(EngineUnavailable):
                await ids_of(stream)
            await until(lambda restarts=restarts: client.restarts == restarts and client.pid is not None)
            await insistent(client, (1, 3), 1)
        assert len((await insistent(client, (1, 2), 10))[0]) == 10
