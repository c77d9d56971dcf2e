"""A profile of a running server: what it names, that there is one at a time, and that it ends when its caller goes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from service.pb.whippet.v1 import admin_pb2
from tests.service.conftest import PATIENCE, ROOT, STEP, Server, ask_stream, refused

pytestmark = pytest.mark.product

CANARY = "zxcanaryzx"


def profile_request(milliseconds: int) -> admin_pb2.ProfileRequest:
    duration = Duration()
    duration.FromMilliseconds(milliseconds)
    return admin_pb2.ProfileRequest(duration=duration)


def stacks(server: Server, milliseconds: int = 300) -> dict[str, str]:
    response = server.admin.Profile(profile_request(milliseconds), timeout=PATIENCE)
    return {one.process: one.stacks for one in response.processes}


def until(server: Server, found: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    """Profiles until one is as wished."""
    end = time.monotonic() + PATIENCE
    while not found(taken := stacks(server)):
        assert time.monotonic() < end, taken
    return taken


def running(server: Server) -> tuple[grpc.Future, grpc.RpcError]:
    """A long profile that is being taken, and how a second one was refused beside it."""
    call = server.admin.Profile.future(profile_request(60_000), timeout=70)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            server.admin.Profile(profile_request(1), timeout=PATIENCE)
        except grpc.RpcError as error:
            return call, error
    raise AssertionError("two at once")


@pytest.fixture(scope="module")
def busy(serve: Callable[..., contextlib.AbstractContextManager[Server]]) -> Iterator[Server]:
    """Always streaming."""
    with serve(f"--fake.step-time={STEP}", "--scheduler.max-sequences=8") as one:
        over = threading.Event()

        def stream() -> None:
            while not over.is_set():
                with contextlib.suppress(grpc.RpcError):  # while the engine is restarted
                    list(one.generation.GenerateStream(ask_stream(CANARY, 200), timeout=PATIENCE))

        threads = [threading.Thread(target=stream) for _ in range(4)]
        for thread in threads:
            thread.start()
        yield one
        over.set()
        for thread in threads:
            thread.join()
        one.idle()
        assert one.stop() == 0, one.log.read_text()


def test_a_profile_under_load_names_known_functions_and_nothing_of_a_request(busy: Server) -> None:
    # Not a handler's: the sampler looks where the GIL is let go, which a front that keeps up does while it waits.
    taken = until(
        busy,
        lambda taken: (
            "serve (service/main.py:" in taken["front"] and "Loop._step (engine/worker/loop.py:" in taken["engine"]
        ),
    )
    assert set(taken) == {"front", "engine"}
    assert CANARY not in str(taken)
    assert str(ROOT) not in str(taken)  # of the server's own files, where they lie is told no one


def test_a_second_one_is_refused_and_a_cancelled_one_stops(busy: Server) -> None:
    call, error = running(busy)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    call.cancel()

    def alone(taken: dict[str, str]) -> bool:
        return all("stack sampler" not in text for text in taken.values())

    end = time.monotonic() + PATIENCE
    while True:
        try:
            assert stacks(busy, 1) is not None
            break
        except grpc.RpcError:
            assert time.monotonic() < end, "it goes on"
    until(busy, alone)


@pytest.mark.parametrize("milliseconds", [0, -1, 60_001])
def test_how_long_is_bounded(busy: Server, milliseconds: int) -> None:
    assert refused(busy.admin.Profile, profile_request(milliseconds)).fields == {"duration"}


def test_an_engine_that_dies_meanwhile_is_told_and_the_front_is_not_lost(busy: Server) -> None:
    before = busy.engine_pid()
    call = busy.admin.Profile.future(profile_request(500), timeout=70)
    os.kill(before, signal.SIGKILL)
    front, engine = call.result().processes
    assert front.stacks
    assert not engine.stacks
    assert engine.why_not.startswith("the engine is ")
    busy.until(lambda load: load.state == admin_pb2.ENGINE_STATE_READY and load.restarts == 1)


def whippet(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "service.cli", "profile", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_command_writes_stacks_of_both_processes(busy: Server, tmp_path: Path) -> None:
    out = tmp_path / "stacks.txt"
    done = whippet(busy.admin_address, "--seconds", "0.3", "-o", str(out))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert {line.partition(";")[0] for line in out.read_text().splitlines()} == {"front", "engine"}
    assert all(line.rpartition(" ")[2].isdecimal() for line in out.read_text().splitlines())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["127.0.0.1:1"], 64 + 14, "no answer from 127.0.0.1:1"),
        (["--seconds", "0"], 2, "--seconds must be above 0"),
        (["-o", "/no/such/folder/x"], 2, "/no/such/folder/x: No such file"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(arguments: list[str], code: int, said: str) -> None:
    done = whippet(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("whippet: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_command_passes_a_refusal_on(busy: Server) -> None:
    done = whippet(busy.admin_address, "--seconds", "61")
    assert done.returncode == 64 + 3
    assert "duration" in done.stderr
