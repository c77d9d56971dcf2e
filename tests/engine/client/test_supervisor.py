"""Deaths, hangs, refusals and nonsense, with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engine import launch
from engine.api import EngineState, TokenStream
from engine.client import EngineClient, child
from engine.client.supervisor import Backoff
from engine.errors import EngineFailed, EngineUnavailable, Unsupported
from engine.fake import Fault, plain_request
from engine.ipc.frames import Cancel, ConfigureEngine, Ready, report_reader
from engine.ipc.framing import encode
from engine.ipc.step_mark import StepMark
from engine.settings import EngineSettings, FakeSettings, LogLevel
from tests.waiting import until

PATIENCE = 60.0  # seconds after which a test that waits has failed
ROOT = Path(__file__).resolve().parents[3]
FAKE = EngineSettings(model="", kind="fake", fake=FakeSettings(faults=True, step_time=0.002))
QUICK = Backoff(base=0.02, cap=0.1)


@asynccontextmanager
async def running(hang_timeout: float = 60.0) -> AsyncIterator[EngineClient]:
    client = EngineClient(replace(FAKE, hang_timeout=hang_timeout), backoff=QUICK)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def ids_of(stream: TokenStream) -> list[int]:
    return [token_id async for events in stream for token_id in events.token_ids]


def pid_of(client: EngineClient) -> int:
    assert client.pid is not None
    return client.pid


def alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def works_again(client: EngineClient, restarts: int = 1) -> None:
    await until(lambda: client.restarts == restarts and client.state is EngineState.READY)
    assert len(await ids_of(client.submit(plain_request((1, 2), 10)))) == 10


async def recovers(client: EngineClient) -> None:
    """After a hang. Where the timeout is short, a slow machine may take the next process for hung as well."""
    while True:
        await until(lambda: client.restarts > 0 and client.state is EngineState.READY)
        with contextlib.suppress(EngineUnavailable):
            assert len(await ids_of(client.submit(plain_request((1, 2), 10)))) == 10
            return


@pytest.mark.product
async def test_killed_in_mid_stream() -> None:
    async with running() as client:
        streams = [client.submit(plain_request((1, number), 4000)) for number in range(5)]
        await asyncio.gather(*[anext(stream) for stream in streams])
        os.kill(pid_of(client), signal.SIGKILL)
        started = time.monotonic()
        results = await asyncio.gather(*[ids_of(stream) for stream in streams], return_exceptions=True)
        assert time.monotonic() - started < PATIENCE
        assert all(isinstance(result, EngineUnavailable) and result.retry_after > 0 for result in results)
        assert client.live == 0
        assert client.load.running == 0
        with pytest.raises(EngineUnavailable):
            client.submit(plain_request((1,)))
        with pytest.raises(EngineUnavailable):
            await client.set_optimization("batching", False)
        assert client.state is EngineState.RESTARTING
        await works_again(client)


@pytest.mark.product
async def test_a_crash_and_a_lost_device_are_followed_by_another_process() -> None:
    async with running() as client:
        for restarts, fault in enumerate((Fault.CRASH, Fault.DEVICE), start=1):
            pid = client.pid
            with pytest.raises(EngineUnavailable):
                await ids_of(client.submit(plain_request((0, fault, 3))))
            await works_again(client, restarts)
            assert client.pid != pid


@pytest.mark.product
async def test_a_stopped_process_is_a_hang() -> None:
    async with running(hang_timeout=1.5) as client:
        stream = client.submit(plain_request((1,), 4000))
        await anext(stream)
        pid = pid_of(client)
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(EngineUnavailable):
            await ids_of(stream)
        assert 1.3 < time.monotonic() - started < PATIENCE
        await recovers(client)
        assert not alive(pid)


@pytest.mark.product
async def test_a_switch_that_nobody_answers_is_a_hang() -> None:
    async with running(hang_timeout=1.5) as client:
        os.kill(pid_of(client), signal.SIGSTOP)
        with pytest.raises(EngineUnavailable):
            await client.set_optimization("batching", False)
        await recovers(client)


@pytest.mark.product
async def test_a_step_that_never_ends_is_a_hang_for_all() -> None:
    async with running(hang_timeout=1.5) as client:
        bystander = asyncio.create_task(ids_of(client.submit(plain_request((1,), 4000))))
        with pytest.raises(EngineUnavailable):
            await ids_of(client.submit(plain_request((0, Fault.HANG, 3))))
        with pytest.raises(EngineUnavailable):
            await bystander
        await recovers(client)


@pytest.mark.proof
async def test_neither_idleness_nor_a_paused_reader_nor_a_busy_front_is_a_hang() -> None:
    clients = [EngineClient(replace(FAKE, hang_timeout=3.0), stream_buffer=2000) for _ in range(2)]
    for client in clients:
        await client.start()
    idle, paused = clients
    stream = paused.submit(plain_request((1,), 400))
    await until(lambda: paused.load.paused == 1)
    await asyncio.sleep(3.5)
    time.sleep(4.0)  # noqa: ASYNC251
    assert len(await ids_of(stream)) == 400
    assert idle.restarts == paused.restarts == 0
    for client in clients:
        await client.close()


@pytest.mark.product
async def test_switches_outlive_the_process() -> None:
    async with running() as client:
        await client.set_optimization("batching", False)
        os.kill(pid_of(client), signal.SIGKILL)
        await works_again(client)
        streams = [client.submit(plain_request((1, number), 400)) for number in range(3)]
        await until(lambda: (client.load.running, client.load.waiting) == (1, 2))
        for stream in streams:
            stream.cancel()


@pytest.mark.product
async def test_it_can_be_closed_between_two_processes() -> None:
    client = EngineClient(FAKE, backoff=Backoff(base=60.0, cap=60.0))
    await client.start()
    os.kill(pid_of(client), signal.SIGKILL)
    await until(lambda: client.state is EngineState.RESTARTING)
    started = time.monotonic()
    await client.close()
    assert time.monotonic() - started < PATIENCE
    assert client.state is EngineState.STOPPED


@pytest.mark.product
async def test_a_hung_process_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.client.supervisor._STOP_GRACE", 0.5)
    client = EngineClient(FAKE)
    await client.start()
    pid = pid_of(client)
    os.kill(pid, signal.SIGSTOP)
    await client.close()
    assert not alive(pid)


@pytest.mark.product
async def test_a_process_that_is_killed_and_closed_at_once_leaves_no_zombie() -> None:
    """Also where its end is being waited for when that is cut short."""
    for pause in (0.0, 0.001, 0.005):
        client = EngineClient(FAKE)
        await client.start()
        pid = pid_of(client)
        client.kill()
        await asyncio.sleep(pause)
        await client.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)  # finds a zombie


@pytest.mark.product
async def test_a_refusal_is_told_once_and_final() -> None:
    settings = EngineSettings(model="", kind="fake", fake=FakeSettings(vocab_size=5))
    client = EngineClient(settings, backoff=QUICK)
    with pytest.raises(Unsupported, match="vocabulary of at least 127, not 5"):
        await client.start()
    assert client.state is EngineState.STOPPED
    assert client.restarts == 0
    await client.close()


@pytest.mark.product
@pytest.mark.parametrize("executable", ["/bin/false", "/nonexistent"])
async def test_a_process_that_never_comes_up_is_given_up(executable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.sys, "executable", executable)
    client = EngineClient(FAKE, backoff=QUICK)
    with pytest.raises(EngineFailed, match="3 times"):
        await client.start()
    assert client.state is EngineState.STOPPED
    await client.close()


@pytest.mark.product
async def test_signals_of_a_terminal_do_not_reach_it() -> None:
    async with running() as client:
        pid = pid_of(client)
        assert os.getsid(pid) != os.getsid(0)
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        assert len(await ids_of(client.submit(plain_request((1, 2), 50)))) == 50
        assert client.restarts == 0


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


@pytest.mark.product
async def test_where_memory_runs_out_it_goes_before_the_front() -> None:
    async with running() as client:
        assert oom_score(pid_of(client)) == min(1000, oom_score(os.getpid()) + 300)


FRONT = """
    import asyncio, sys
    from engine.client import EngineClient
    from engine.fake import plain_request
    from engine.settings import EngineSettings, FakeSettings

    async def main():
        client = EngineClient(EngineSettings(model="", kind="fake", fake=FakeSettings(faults=True)))
        await client.start()
        stream = client.submit(plain_request(PROMPT, 4000)) if PROMPT else None
        await asyncio.sleep(0.3)
        print(client.pid, flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


@pytest.mark.product
@pytest.mark.parametrize("prompt", [(), (1, 2), (0, int(Fault.HANG), 3)], ids=["idle", "busy", "hung"])
async def test_no_orphan_survives_the_front(prompt: tuple[int, ...]) -> None:
    script = textwrap.dedent(FRONT).replace("PROMPT", repr(prompt))
    front = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert front.stdout is not None
    pid = int(await asyncio.wait_for(front.stdout.readline(), PATIENCE))
    assert alive(pid)
    front.kill()
    await front.wait()
    await until(lambda: not alive(pid))


@asynccontextmanager
async def bare_process() -> AsyncIterator[tuple[asyncio.subprocess.Process, socket.socket]]:
    """An engine process whose front is the test."""
    ours, theirs = socket.socketpair()
    mark = StepMark.create()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "engine.worker.process", "--fd", str(theirs.fileno()), "--step-mark", str(mark)),
        cwd=ROOT,
        pass_fds=[theirs.fileno(), mark],
        stderr=subprocess.PIPE,
    )
    theirs.close()
    os.close(mark)
    ours.settimeout(PATIENCE)
    with ours:
        yield process, ours
        if process.returncode is None:
            process.kill()
        await process.wait()


async def verdict(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    _, errors = await asyncio.wait_for(process.communicate(), PATIENCE)
    return process.returncode, errors.decode()


@pytest.mark.proof
@pytest.mark.parametrize(
    "nonsense",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x01\xc1", b"\xff" * 64, encode(Cancel(1))],
    ids=["http", "no msgpack", "giant", "no settings"],
)
async def test_nonsense_instead_of_settings_is_told(nonsense: bytes) -> None:
    async with bare_process() as (process, front):
        front.sendall(nonsense)
        code, errors = await verdict(process)
        assert code == 1
        assert "front sent a broken message" in errors
        assert "Traceback" not in errors


@pytest.mark.product
async def test_nonsense_later_is_told() -> None:
    async with bare_process() as (process, front):
        front.sendall(encode(ConfigureEngine(FAKE)))
        (ready,) = report_reader().feed(await asyncio.to_thread(front.recv, 1 << 16))
        assert isinstance(ready, Ready)
        front.sendall(b"\x00\x00\x00\x02\x91\x63")
        code, errors = await verdict(process)
        assert code == 1
        assert "front sent a broken message" in errors


@pytest.mark.product
async def test_a_process_whose_front_is_gone_ends_quietly() -> None:
    async with bare_process() as (process, front):
        front.sendall(encode(ConfigureEngine(FAKE)))
        await asyncio.to_thread(front.recv, 1 << 16)
        front.close()
        assert await verdict(process) == (0, "")


@pytest.mark.proof
@pytest.mark.parametrize(("level", "speaks"), [("info", False), ("debug", True)])
async def test_it_logs_at_the_level_that_it_is_given(level: LogLevel, speaks: bool) -> None:
    async with bare_process() as (process, front):
        front.sendall(encode(ConfigureEngine(replace(FAKE, log_level=level))))
        await asyncio.to_thread(front.recv, 1 << 16)
        front.close()
        _, errors = await verdict(process)
        assert ("DEBUG ready: " in errors) is speaks


@pytest.mark.product
async def test_nonsense_from_the_process_ends_it() -> None:
    process = subprocess.Popen(["/bin/sleep", "60"])  # noqa: ASYNC220
    ours, theirs = socket.socketpair()
    with launch._step_mark() as (_, mark):
        one = child.Child(process, mark, lambda report: None)
    await asyncio.get_running_loop().create_unix_connection(lambda: one, sock=ours)
    with theirs:
        theirs.sendall(b"\x00\x00\x00\x01\xc1")
        await asyncio.wait_for(one.closed, PATIENCE)
        assert await one.end(grace=5.0) == -signal.SIGKILL


@pytest.mark.product
async def test_only_starts_that_fail_make_the_next_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was ready and dies is replaced at once, however often: its load is what callers wait for."""
    failures: list[int] = []
    delay = Backoff.delay

    def spy(self: Backoff, count: int) -> float:
        failures.append(count)
        return delay(self, count)

    monkeypatch.setattr(Backoff, "delay", spy)
    async with running() as client:
        for restarts in range(1, 4):
            os.kill(pid_of(client), signal.SIGKILL)
            await until(lambda restarts=restarts: client.restarts == restarts and client.state is EngineState.READY)
        with monkeypatch.context() as broken:
            broken.setattr(launch.sys, "executable", "/bin/false")
            client.kill()
            await until(lambda: failures[-1] == 3)
        await until(lambda: client.state is EngineState.READY)
        assert failures[:7] == [1, 1, 1, 1, 1, 2, 3]


def test_delays_grow_to_a_cap_and_scatter() -> None:
    backoff = Backoff(base=0.5, cap=8.0)
    for failures, whole in enumerate([0.5, 1.0, 2.0, 4.0, 8.0, 8.0], start=1):
        delays = [backoff.delay(failures) for _ in range(200)]
        assert whole / 2 <= min(delays) < whole * 0.6
        assert whole * 0.9 < max(delays) <= whole
    assert backoff.delay(10_000) <= 8.0


@pytest.mark.product
async def test_it_is_started_once() -> None:
    async with running() as client:
        with pytest.raises(RuntimeError, match="once"):
            await client.start()


@pytest.mark.product
async def test_a_fault_of_the_supervisor_itself_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as client:
        stream = client.submit(plain_request((1,), 4000))
        await anext(stream)
        monkeypatch.setattr(Backoff, "delay", lambda self, failures: 1 / 0)
        os.kill(pid_of(client), signal.SIGKILL)
        with pytest.raises(EngineUnavailable):
            await ids_of(stream)
        await until(lambda: client.state is EngineState.STOPPED)
    client = EngineClient(FAKE)
    monkeypatch.setattr(child.Child, "spawn", lambda settings, on_report, begun: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await client.start()
