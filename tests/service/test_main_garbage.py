"""What calls leave behind that only a collection frees. A front under load has no time for one: it would look at
everything that hundreds of streams have."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from cache.api import LINGER
from service.pb.whippet.v1 import generation_pb2_grpc
from tests.service.conftest import PATIENCE, all_flags, ask, ask_stream

# Looks only when it is told to, and says how much it found.
COUNTING = """
import asyncio, gc, signal, sys
from service.main import serve
from service.transport.garbage import Garbage

def look():
    print("found", gc.collect(), flush=True)

async def run(self, live):
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, look)
    await asyncio.Event().wait()

Garbage.run = run
sys.exit(serve(sys.argv[1:]))
"""
CALLS = 40
OF_GRPC = 8  # objects a call, at most; what it leaves in a server of its own
Stub = generation_pb2_grpc.GenerationServiceStub


class Counting:
    """A server that says on request what it finds."""

    def __init__(self, process: subprocess.Popen[str], log: Path, address: str) -> None:
        self._process = process
        self._log = log
        self.stub = Stub(grpc.insecure_channel(address))

    def found(self) -> int:
        """Objects, since it was last asked."""
        before = len(self._said())
        self._process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + PATIENCE
        while len(said := self._said()) == before:
            assert time.monotonic() < end, "it says nothing"
            time.sleep(0.01)
        return said[-1]

    def _said(self) -> list[int]:
        return [int(one) for one in re.findall(r"^found (\d+)$", self._log.read_text(), re.MULTILINE)]


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counting]:
    log = tmp_path_factory.mktemp("counting") / "log"
    flags = all_flags("--optimizations.response-cache=true", "--fake.step-time=0.001", "--scheduler.max-sequences=4")
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-c", COUNTING, *flags], stdout=out, stderr=out, text=True)
    try:
        end = time.monotonic() + 2 * PATIENCE
        while (match := re.search(r"^ready: data (\S+)", log.read_text(), re.MULTILINE)) is None:
            assert time.monotonic() < end, log.read_text()
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        made = Counting(process, log, match[1])
        made.stub.Generate(ask("the first of all"), timeout=PATIENCE)
        yield made
    finally:
        process.terminate()
        process.wait(PATIENCE)


def streamed(stub: Stub, number: int) -> None:
    assert [*stub.GenerateStream(ask_stream(f"stream {number}"), timeout=PATIENCE)]


def whole(stub: Stub, number: int) -> None:
    stub.Generate(ask(f"whole {number}"), timeout=PATIENCE)


def kept(stub: Stub, number: int) -> None:
    stub.Generate(ask("whole 1"), timeout=PATIENCE)


def shared(stub: Stub, number: int) -> None:
    for call in [stub.GenerateStream(ask_stream(f"shared {number}", 20), timeout=PATIENCE) for _ in range(2)]:
        assert [*call]


def left(stub: Stub, number: int) -> None:
    call = stub.GenerateStream(ask_stream(f"left {number}", 2000), timeout=PATIENCE)
    next(call)
    call.cancel()
    with contextlib.suppress(grpc.RpcError):
        list(call)


def wrong(stub: Stub, number: int) -> None:
    with pytest.raises(grpc.RpcError):
        stub.Generate(ask(f"wrong {number}", -1), timeout=PATIENCE)


@pytest.mark.parametrize("call", [streamed, whole, kept, shared, left, wrong])
def test_calls_leave_nothing_of_ours_in_circles(counting: Counting, call: Callable[[Stub, int], None]) -> None:
    counting.found()
    for number in range(CALLS):
        call(counting.stub, number)
    time.sleep(1.5 * LINGER)  # an answer that has just ended may still be joined
    assert counting.found() <= 2 * OF_GRPC * CALLS
