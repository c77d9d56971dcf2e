"""Text processes: the same ids as in the front, bounded in time and memory, replaced where they die, gone with it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import DeadlineExceeded, InvalidModel
from service.core.errors import Overloaded
from service.core.text import ChatMessage, Tokenizer
from service.core.text.conversation import NO_OPTIONS
from service.core.text.sandbox.jobs import KINDS, EncodeChat, EncodeText, JobRefused, pack, pack_ids, unpack_ids
from service.core.text.sandbox.processes import SMALL, JobFailed, ProcessLimits, TextProcesses
from tests.waiting import gone

pytestmark = pytest.mark.product

DEMO = Path("models/demo")
# Jobs that misbehave, in a module of their own that the fork server imports.
ODD = """
import os, time
from service.core.text.sandbox.jobs import JobRefused
def sleeps(tokenizer, payload): time.sleep(float(payload or b"3600")); return payload
def grows(tokenizer, payload): return bytes(2**30)
def aborts(tokenizer, payload): os.abort()
def dies(tokenizer, payload): os._exit(7)
def raises(tokenizer, payload): raise KeyError("a secret")
def refuses(tokenizer, payload): raise JobRefused("is not liked")
def echoes(tokenizer, payload): return payload
def environment(tokenizer, payload): return repr(dict(os.environ)).encode()
def process(tokenizer, payload): return str(os.getpid()).encode()
"""
NAMES = ("sleeps", "grows", "aborts", "dies", "raises", "refuses", "echoes", "environment", "process")
LIMITS = ProcessLimits(processes=1, seconds=60.0, memory=256 * 2**20, jobs=4, waiting=SMALL * 8)


@pytest.fixture
async def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TextProcesses]:
    (tmp_path / "odd_jobs.py").write_text(ODD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WHIPPET_SECRET", "hunter2")
    quick = ProcessLimits(processes=1, seconds=3.0, memory=256 * 2**20, jobs=4, waiting=2**30)
    kinds = {**KINDS, **{name: f"odd_jobs:{name}" for name in NAMES}}
    made = TextProcesses(str(DEMO), kinds, small=LIMITS, large=quick)
    await made.start()
    yield made
    await made.close()


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(60):
        while not gone(pid):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


async def test_the_same_ids_as_in_the_front(processes: TextProcesses) -> None:
    front = Tokenizer.load(DEMO)
    for text in ("", "def f(x):\n    return x\n", "long " * 30_000):
        assert list(unpack_ids(await processes.run("encode", pack(EncodeText(text, None))))) == front.encode(text)
        messages = (ChatMessage("user", text), ChatMessage("assistant", "yes <|im_end|>"))
        ids = list(unpack_ids(await processes.run("encode_chat", pack(EncodeChat(messages, NO_OPTIONS, None)))))
        assert ids == front.encode_chat(messages)
        assert (await processes.run("decode", pack_ids(ids))).decode() == front.decode(ids)
    assert processes.digest == front.digest


async def test_more_ids_than_asked_for_are_refused(processes: TextProcesses) -> None:
    with pytest.raises(JobRefused, match=r"has at least .* tokens; .* room for 11"):
        await processes.run("encode", pack(EncodeText("one two three " * 20, 10)))
    with pytest.raises(JobRefused, match=r"has at least .* tokens"):
        await processes.run(
            "encode_chat", pack(EncodeChat((ChatMessage("user", "one two three " * 20),), NO_OPTIONS, 10))
        )


async def test_the_next_job_is_done_whatever_became_of_the_one_before(processes: TextProcesses) -> None:
    for kind, error, what in (
        ("grows", JobRefused, "more memory"),
        ("aborts", JobRefused, "more memory"),
        ("dies", JobFailed, "ended with 7"),
        ("raises", JobFailed, "KeyError$"),
        ("refuses", JobRefused, "is not liked"),
    ):
        with pytest.raises(error, match=what):
            await processes.run(kind, b"")
        assert await processes.run("echoes", b"next") == b"next"


async def test_a_job_that_takes_too_long_is_killed(processes: TextProcesses) -> None:
    large = b" " * SMALL + b"3600"
    with pytest.raises(JobRefused, match="more than 3 seconds"):
        await processes.run("sleeps", large)
    assert await processes.run("echoes", large) == large


async def test_small_jobs_do_not_wait_behind_a_large_one(processes: TextProcesses) -> None:
    large = asyncio.create_task(processes.run("sleeps", b" " * SMALL + b"3600"))
    assert await processes.run("echoes", b"small") == b"small"
    assert not large.done()
    with pytest.raises(JobRefused):
        await large


async def test_as_many_jobs_at_once_as_there_are_processes(processes: TextProcesses) -> None:
    two = TextProcesses(None, {"sleeps": "odd_jobs:sleeps"}, small=replace(LIMITS, processes=2))
    await two.start()
    slow = [asyncio.create_task(two.run("sleeps", b"0.2")) for _ in range(2)]
    third = asyncio.create_task(two.run("sleeps", b"0.0"))
    await asyncio.wait((*slow, third), return_when=asyncio.FIRST_COMPLETED)
    assert not third.done()  # one of the slow ones is
    assert await third == b"0.0"
    await asyncio.gather(*slow)
    await two.close()


async def test_a_cancelled_job_is_killed(processes: TextProcesses) -> None:
    pid = int(await processes.run("process", b""))
    job = asyncio.create_task(processes.run("sleeps", b""))
    await asyncio.sleep(0)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert await processes.run("echoes", b"next") == b"next"  # well before the job's minute
    await until_gone(pid)


async def test_a_cancelled_job_that_ends_soon_costs_no_process(processes: TextProcesses) -> None:
    pid = await processes.run("process", b"")
    for _ in range(20):
        job = asyncio.create_task(processes.run("echoes", b"x"))
        await asyncio.sleep(0)
        job.cancel()
        await asyncio.wait([job])
    assert await processes.run("process", b"") == pid


async def test_the_queue_is_bounded(processes: TextProcesses) -> None:
    jobs = [asyncio.create_task(processes.run("sleeps", b"")) for _ in range(5)]  # one runs, four wait
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="too much text waits") as refusal:
        await processes.run("echoes", b"")
    assert refusal.value.retry_after > 0
    for job in jobs:
        job.cancel()
    await asyncio.wait(jobs)
    assert await processes.run("echoes", b"room again") == b"room again"


async def test_a_deadline_ends_a_job_that_waits_or_runs(processes: TextProcesses) -> None:
    running = asyncio.create_task(processes.run("sleeps", b"", time.monotonic() + 0.3))
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded):
        await processes.run("echoes", b"", time.monotonic() + 0.05)
    with pytest.raises(DeadlineExceeded):
        await running
    assert await processes.run("echoes", b"next") == b"next"


async def test_a_fork_server_that_died_is_replaced(processes: TextProcesses) -> None:
    (before,) = processes.pids
    worker = int(await processes.run("process", b""))
    running = asyncio.create_task(processes.run("sleeps", b""))
    await asyncio.sleep(0)
    os.kill(before, signal.SIGKILL)
    with pytest.raises(JobFailed):
        await running
    assert await processes.run("echoes", b"next") == b"next"
    assert processes.pids != (before,)
    await until_gone(worker)


async def test_nothing_secret_is_in_its_environment(processes: TextProcesses) -> None:
    assert b"hunter2" not in await processes.run("environment", b"")


async def test_a_broken_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    broken = TextProcesses(str(tmp_path))
    with pytest.raises(InvalidModel, match="is no tokenizer"):
        await broken.start()
    await broken.close()


FRONT = """
import asyncio, sys
from service.core.text.sandbox.processes import TextProcesses
async def main():
    processes = TextProcesses(None, {"process": "odd_jobs:process", "sleeps": "odd_jobs:sleeps"})
    await processes.start()
    pid = (await processes.run("process", b"")).decode()
    job = asyncio.create_task(processes.run("sleeps", b""))
    print(processes.pids[0], pid, flush=True)
    await job
asyncio.run(main())
"""


def test_they_die_with_the_front(tmp_path: Path) -> None:
    (tmp_path / "odd_jobs.py").write_text(ODD)
    environment = dict(os.environ, PYTHONPATH=f"{tmp_path}:{Path.cwd()}")
    with subprocess.Popen([sys.executable, "-c", FRONT], stdout=subprocess.PIPE, env=environment) as front:
        assert front.stdout is not None
        pids = [int(pid) for pid in front.stdout.readline().split()]
        assert len(pids) == 2
        front.kill()
    for pid in pids:
        asyncio.run(until_gone(pid))
