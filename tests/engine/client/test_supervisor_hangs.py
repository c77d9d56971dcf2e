"""An engine process that shows no life is found out within the hang timeout, whoever calls and whether anybody does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine import launch
from engine.api import EngineState
from engine.client import EngineClient
from engine.errors import EngineFailed, EngineUnavailable
from engine.fake import Fault, plain_request
from tests.engine.client.test_supervisor import (
    FAKE,
    PATIENCE,
    QUICK,
    alive,
    ids_of,
    pid_of,
    recovers,
    running,
)
from tests.waiting import until

pytestmark = pytest.mark.product

TIMEOUT = 1.0  # seconds of silence that are a hang in these tests
WHILE_LOADING = 0.5


async def impatient_callers(client: EngineClient) -> None:
    """Each gives up long before the hang timeout, so that between two of them nothing is live."""
    while True:
        with contextlib.suppress(EngineUnavailable, TimeoutError):
            stream = client.submit(plain_request((1, 2), 4000))
            try:
                async with asyncio.timeout(TIMEOUT / 20):
                    async for _ in stream:
                        pass
            finally:
                stream.cancel()
        await asyncio.sleep(TIMEOUT / 20)


async def lost(client: EngineClient) -> None:
    await until(lambda: client.state is not EngineState.READY or client.deaths["hung"] > 0)
    if client.state is not EngineState.READY:  # a slow machine may look when the next one is
        with pytest.raises(EngineUnavailable):
            client.submit(plain_request((1,)))


async def test_callers_with_short_deadlines_do_not_hide_a_stopped_process() -> None:
    async with running(TIMEOUT) as client:
        callers = [asyncio.create_task(impatient_callers(client)) for _ in range(3)]
        pid = pid_of(client)
        os.kill(pid, signal.SIGSTOP)
        await lost(client)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        await recovers(client)
        await until(lambda: not alive(pid))


async def test_nor_a_step_that_never_ends() -> None:
    async with running(TIMEOUT) as client:
        hung = client.submit(plain_request((0, Fault.HANG, 0), 4000))
        callers = [asyncio.create_task(impatient_callers(client)) for _ in range(3)]
        await asyncio.sleep(TIMEOUT / 20)
        hung.cancel()
        await lost(client)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        await recovers(client)


async def test_nobody_has_to_call_and_it_is_found_within_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    """By what the log says; a clock beside it would measure how busy the machine is."""
    async with running(TIMEOUT) as client:
        os.kill(pid_of(client), signal.SIGSTOP)
        await lost(client)
        await recovers(client)
    line, *_ = [record.getMessage() for record in caplog.records if "no sign of life" in record.getMessage()]
    silence = float(line.partition("gave no sign of life for ")[2].partition(" s")[0])
    assert 0.9 * TIMEOUT <= silence < PATIENCE


def interpreter(folder: Path, script: str) -> str:
    """A program that is started in the place of Python."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport os, sys, time\n{textwrap.dedent(script)}")
    path.chmod(0o755)
    return str(path)


async def test_a_process_that_loads_and_does_nothing_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.sys, "executable", interpreter(tmp_path, "time.sleep(600)"))
    client = EngineClient(replace(FAKE, hang_timeout=WHILE_LOADING), backoff=QUICK)
    with pytest.raises(EngineFailed, match=r"no sign of life .* while loading, 3 times"):
        await client.start()
    await client.close()


async def test_one_that_computes_without_end_hangs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.client.supervisor._LONGEST_WORK", 1)
    monkeypatch.setattr(launch.sys, "executable", interpreter(tmp_path, "while True: pass"))
    client = EngineClient(replace(FAKE, hang_timeout=WHILE_LOADING), backoff=QUICK)
    with pytest.raises(EngineFailed, match=r"no sign of life .* while loading, 3 times"):
        await asyncio.wait_for(client.start(), PATIENCE)
    await client.close()


async def test_one_that_is_stopped_while_it_loads_is_replaced_and_who_waits_is_answered() -> None:
    async with running(TIMEOUT) as client:
        await client.set_optimization("batching", False)
        stream = client.submit(plain_request((1,), 4000))
        await anext(stream)
        waiting = asyncio.create_task(ids_of(client.submit(plain_request((1, 2), 10))))
        await until(lambda: client.load.waiting == 1)
        first = pid_of(client)
        os.kill(first, signal.SIGKILL)
        await until(lambda: client.pid not in (None, first))
        os.kill(pid_of(client), signal.SIGSTOP)
        assert len(await asyncio.wait_for(waiting, PATIENCE)) == 10
        assert client.restarts >= 2
        assert client.deaths["killed"] == 1
        assert client.deaths["hung"] >= 1
        with pytest.raises(EngineUnavailable):
            await ids_of(stream)


async def test_one_that_computes_for_long_before_it_says_anything_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
    end = time.monotonic() + 3
    while time.monotonic() < end:
        pass
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
    """
    monkeypatch.setattr(launch.sys, "executable", interpreter(tmp_path, script))
    client = EngineClient(replace(FAKE, hang_timeout=1.2), backoff=QUICK)
    started = time.monotonic()
    await client.start()
    assert time.monotonic() - started > 3
    assert client.restarts == 0
    await client.close()


async def test_callers_are_told_to_come_back_once_another_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the first start took, in however many seconds that was."""
    script = f"""
    time.sleep(1.5)
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
    """
    monkeypatch.setattr(launch.sys, "executable", interpreter(tmp_path, script))
    client = EngineClient(FAKE, backoff=QUICK)
    assert 0 < client.unavailable().retry_after < 60
    started = time.monotonic()
    await client.start()
    took = time.monotonic() - started
    client.kill()
    await until(lambda: client.state is EngineState.RESTARTING)
    hints = [client.unavailable().retry_after for _ in range(100)]
    assert 0.9 * took < min(hints) < max(hints) < 1.5 * took
    assert max(hints) > 1.1 * min(hints)  # they do not all come at once
    await client.close()
