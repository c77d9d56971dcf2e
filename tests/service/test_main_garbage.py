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
from typing import cast

import grpc
import pytest

from cache.api import LINGER
from service.pb.whippet.v1 import generation_pb2_grpc
from tests.service.conftest import PATIENCE, Server, ask, ask_stream
from tests.service.forked import Template

pytestmark = pytest.mark.proof

# Looks only when it is told to, and says how much it found.
COUNTING = """
import asyncio, gc, signal, sys
from service.main import serve
from service.transport.process.garbage import Garbage

def look():
    print("found", gc.collect(), flush=True)

async def run(self, live):
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, look)
    await asyncio.Event().wait()

Garbage.run = run
sys.exit(serve(sys.argv[1:]))
"""
CALLS = 40
MOST = 16  # objects: of two calls, of which gRPC leaves five each
Stub = generation_pb2_grpc.GenerationServiceStub


class Interpreter:
    """Starts servers that count, as `forked.Template` starts others."""

    def start(self, flags: list[str], environ: dict[str, str], out: Path, err: Path) -> subprocess.Popen[bytes]:
        with out.open("w") as log:
            return subprocess.Popen([sys.executable, "-c", COUNTING, *flags], env=environ, stdout=log, stderr=log)


def found(server: Server) -> int:
    """Objects in circles, since it was last asked."""
    before = len(said(server))
    server.process.send_signal(signal.SIGUSR1)
    end = time.monotonic() + PATIENCE
    while len(numbers := said(server)) == before:
        assert time.monotonic() < end, "it says nothing"
        time.sleep(0.01)
    return numbers[-1]


def said(server: Server) -> list[int]:
    return [int(one) for one in re.findall(r"^found (\d+)$", server.log.read_text(), re.MULTILINE)]


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = "--optimizations.response-cache=true", "--fake.step-time=0.001", "--scheduler.max-sequences=4"
    server = Server(cast(Template, Interpreter()), *flags, log=tmp_path_factory.mktemp("counting") / "log")
    try:
        server.generation.Generate(ask("the first of all"), timeout=PATIENCE)
        yield server
    finally:
        server.close()


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
def test_calls_leave_nothing_of_ours_in_circles(counting: Server, call: Callable[[Stub, int], None]) -> None:
    found(counting)
    for number in range(CALLS):
        call(counting.generation, number)
    time.sleep(1.5 * LINGER)  # an answer that has just ended may still be joined
    assert found(counting) <= MOST * CALLS
