"""How the engine process is launched."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from engine import launch
from engine.client import EngineClient
from engine.client.child import Child
from engine.ipc.frames import PingEngine, Pong, Report
from engine.ipc.framing import encode
from engine.ipc.step_mark import StepMark
from engine.launch import Begun
from engine.settings import EngineSettings

ROOT = Path(__file__).resolve().parents[3]


def test_the_engine_process_finds_the_packages_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are not installed: the folder that holds `engine` leads the path that it is given."""
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: launched.append(options))
    launch._launch(0, 1, "fake")
    first = Path(launched[0]["env"]["PYTHONPATH"].split(os.pathsep)[0])
    assert (first / "engine" / "worker" / "process.py").is_file()


@pytest.mark.product
def test_a_process_that_was_begun_ends_unless_somebody_has_taken_it() -> None:
    one, other = Begun(), Begun()
    one.end()
    assert one.take()[1].poll() == -signal.SIGKILL
    ours, process, _ = other.take()
    other.end()
    assert process.poll() is None
    ours.close()
    assert process.wait(60) == 0  # nobody tells it what to load


@pytest.mark.product
async def test_what_was_begun_is_the_first_process() -> None:
    begun = Begun()
    client = EngineClient(EngineSettings(model="", kind="fake"), begun=begun)
    await client.start()
    assert client.pid == begun.take()[1].pid
    await client.close()
    begun.end()


@pytest.mark.product
async def test_what_was_told_at_once_is_not_told_again() -> None:
    """And loads before anybody takes it: what it says of that waits."""
    begun = Begun()
    settings = EngineSettings(model="", kind="fake")
    begun.tell(settings)
    ours, process, _ = begun.take()
    assert select.select([ours], [], [], 60)[0], "it is ready before it is taken"
    client = EngineClient(settings, begun=begun)
    await client.start()  # a second message of this kind would be the end of the process
    assert client.restarts == 0
    assert client.pid == process.pid
    await client.close()


@pytest.mark.product
def test_a_process_whose_front_has_gone_ends_before_it_loads() -> None:
    """The front may end in the moment before the kernel is asked to tell of that."""
    ours, theirs = socket.socketpair()
    mark = StepMark.create()
    command = [sys.executable, "-P", "-m", "engine.worker.process", "--fd", str(theirs.fileno())]
    command += ["--step-mark", str(mark), "--parent", "1" if os.getpid() != 1 else "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with ours, theirs:
        done = subprocess.run(command, pass_fds=[theirs.fileno(), mark], env=environment, timeout=60, check=False)
    os.close(mark)
    assert done.returncode == 0


@pytest.mark.product
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_what_a_process_said_before_it_ended_is_heard_though_it_cannot_be_told_more(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """By it the front knows at which token the process ended."""
    heard: list[Report] = []

    async def end_while_it_is_told(process: subprocess.Popen[bytes]) -> int:
        ours, theirs = socket.socketpair()
        with launch._step_mark() as (_, mark):
            one = Child(process, mark, heard.append)
        await asyncio.get_running_loop().create_unix_connection(lambda: one, sock=ours)

        def speak_and_end() -> None:
            with theirs:
                theirs.sendall(encode(Pong()) * 3)

        asyncio.get_running_loop().call_soon(speak_and_end)
        one.send(PingEngine())  # in the same turn of the loop, behind it
        await asyncio.wait_for(one.closed, 60)
        return await one.end(grace=60)

    with subprocess.Popen(["/bin/true"]) as process, asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(end_while_it_is_told(process)) == 0
    assert heard == [Pong()] * 3
