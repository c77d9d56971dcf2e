"""A server whose model is split over processes: they live and die as one, and callers see an engine like any other."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc
import pytest

from service.pb.whippet.v1 import generation_pb2 as pb
from tests.engine.worker.test_ranks_elsewhere import OtherHost, children
from tests.service.conftest import PATIENCE, ROOT, Refusal, Server, ask, ask_stream
from tests.waiting import gone, wait_for

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
SPLIT = (
    *("--engine=model", f"--model={ROOT / 'models' / 'demo-draft'}", "--device=cpu", "--scheduler.threads=1"),
    *("--tensor-parallel=2", "--scheduler.kv-bytes=16777216", "--optimizations.speculation=off"),
)
HANG = 10.0  # seconds
GREEDY = pb.SamplingOptions(temperature=0)
IDS = pb.OutputOptions(token_ids=True)
STREAMS = 3


def rank_pids(server: Server) -> list[int]:
    """Returns the processes of the ranks beside the first."""
    found = []
    for engine in server.engine_pids():
        for pid in Path(f"/proc/{engine}/task/{engine}/children").read_text().split():
            if b"engine.worker.rank" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def served(server: Server) -> list[int]:
    """Asks until the engine serves, and returns its ids; meanwhile it says when to come again."""
    end = time.monotonic() + 2 * PATIENCE
    while True:
        try:
            return list(
                server.generation.Generate(
                    ask("import os", 12, output=IDS, sampling=GREEDY), timeout=PATIENCE
                ).token_ids
            )
        except grpc.RpcError as error:
            refusal = Refusal.of(error)
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE")
            assert refusal.retry_ms > 0
            assert time.monotonic() < end
        time.sleep(0.1)


class Streams:
    """Streams that have begun, each read by a thread to its end."""

    def __init__(self, server: Server) -> None:
        self.ends: list[tuple[grpc.StatusCode, bool]] = []
        self._begun = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._read, args=(server, at)) for at in range(STREAMS)]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self._begun.acquire(timeout=PATIENCE)

    def _read(self, server: Server, number: int) -> None:
        call = server.generation.GenerateStream(ask_stream(f"def f{number}(", 900, stopping={"ignore_eos": True}))
        begun = False
        with contextlib.suppress(grpc.RpcError):
            for message in call:
                assert not message.HasField("finish")
                if message.text and not begun:
                    begun = True
                    self._begun.release()
        self.ends.append((call.code(), "grpc-retry-pushback-ms" in dict(call.trailing_metadata() or ())))

    def join(self) -> list[tuple[grpc.StatusCode, bool]]:
        for thread in self._threads:
            thread.join(2 * PATIENCE)
        return self.ends


def strike(server: Server, sent: signal.Signals) -> None:
    """Sends a signal to the second rank while streams run: the streams and the group end, and another group serves."""
    expected, engine, ranks = served(server), server.engine_pid(), rank_pids(server)
    assert len(expected) == 12
    assert len(ranks) == 1
    streams = Streams(server)
    os.kill(ranks[0], sent)
    assert streams.join() == [(grpc.StatusCode.UNAVAILABLE, True)] * STREAMS
    wait_for(partial(gone, engine, *ranks))
    assert served(server) == expected


def test_a_rank_that_dies_ends_its_group_and_a_front_that_dies_leaves_none_behind(serve: Serve) -> None:
    with serve(*SPLIT) as server:
        strike(server, signal.SIGKILL)
        held = (*server.engine_pids(), *rank_pids(server))
        assert len(held) == 2
        server.process.kill()
        server.process.wait(PATIENCE)
        wait_for(partial(gone, *held))


@pytest.mark.proof
def test_a_rank_that_hangs_ends_its_group_and_a_stop_ends_all(serve: Serve) -> None:
    with serve(*SPLIT, f"--engine.hang-timeout={HANG}") as server:
        strike(server, signal.SIGSTOP)
        held = (*server.engine_pids(), *rank_pids(server))
        assert server.stop() == 0
        wait_for(partial(gone, *held))


@pytest.mark.proof
def test_a_rank_of_another_host_that_dies_ends_its_group_and_joins_the_next(serve: Serve, tmp_path: Path) -> None:
    host = OtherHost(tmp_path)
    elsewhere = ("--engine.ranks-elsewhere=1", f"--engine.ranks-listen=127.0.0.1:{host.port}")
    with host.started() as process:
        with serve(*SPLIT, *elsewhere, f"--engine.ranks-secret-file={host.folder / 'secret'}") as server:
            expected, engine, (rank,) = served(server), server.engine_pid(), children(process.pid)
            streams = Streams(server)
            os.kill(rank, signal.SIGKILL)
            assert streams.join() == [(grpc.StatusCode.UNAVAILABLE, True)] * STREAMS
            wait_for(partial(gone, engine, rank))
            assert served(server) == expected
            held = children(process.pid)
            assert len(held) == 1
            assert server.stop() == 0
        wait_for(partial(gone, *held))


@pytest.mark.proof
def test_a_model_that_cannot_be_split_is_refused(serve: Serve) -> None:
    with pytest.raises(AssertionError, match="cannot be divided among 3"), serve(*SPLIT, "--tensor-parallel=3"):
        pass
