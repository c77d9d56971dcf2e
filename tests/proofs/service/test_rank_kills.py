"""Ranks of a split model that are killed at random moments, while they load, while they serve and while they do
nothing: each stream ends once, nothing hangs, and nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from threading import Thread

import grpc
import pytest

from tests.service.conftest import PATIENCE, Refusal, Server, ask, serve, template
from tests.service.test_main_ranks import SPLIT, rank_pids, served
from tests.waiting import gone, wait_for

__all__ = ["serve", "template"]
Serve = Callable[..., AbstractContextManager[Server]]
KILLS = int(os.environ.get("RANK_KILLS", "3"))
CALLERS = 2


class Callers:
    """Callers that ask one thing after another, until they are told to stop."""

    def __init__(self, server: Server) -> None:
        self.answers = 0
        self.wrong: list[str] = []
        self._server = server
        self._ended = False
        self._threads = [Thread(target=self._ask, args=(at,)) for at in range(CALLERS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, caller: int) -> None:
        seed = random.Random(caller)
        while not self._ended:
            try:
                self._server.generation.Generate(ask("import os", seed.randrange(1, 300)), timeout=PATIENCE)
                self.answers += 1
            except grpc.RpcError as error:
                refusal = Refusal.of(error)
                if refusal.code != grpc.StatusCode.UNAVAILABLE or "RetryInfo" not in refusal.details:
                    self.wrong.append(f"{refusal.code} {refusal.message}")
                time.sleep(0.05)

    def end(self) -> None:
        self._ended = True
        for thread in self._threads:
            thread.join(2 * PATIENCE)
        assert not any(thread.is_alive() for thread in self._threads), "a call hangs"


@pytest.mark.timeout(3600)
def test_ranks_that_are_killed_at_random_moments(serve: Serve) -> None:
    """A rank dies as it loads or serves; the group ends within the hang timeout, and another one is started. Every
    other group may serve first: after starts that fail in a row the server waits ever longer for the next."""
    seed, met = random.Random(8), set[int]()
    with serve(*SPLIT, "--engine.hang-timeout=30", "--engine.give-up=0") as server:
        expected = served(server)
        callers = Callers(server)
        for number in range(KILLS):
            if number % 2:
                served(server)
            time.sleep(seed.uniform(0, 5))
            wait_for(lambda: bool(_ranks(server)))
            (rank,) = _ranks(server)
            engines = server.engine_pids()
            met |= {rank, *engines}
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
            wait_for(partial(gone, rank, *engines))
        callers.end()
        assert not callers.wrong
        assert callers.answers
        assert served(server) == expected
        met |= {*server.engine_pids(), *_ranks(server)}
        assert server.stop() == 0
    wait_for(partial(gone, *met))
    assert not _orphans()


def _ranks(server: Server) -> list[int]:
    try:
        return rank_pids(server)
    except OSError:  # the engine process has just ended
        return []


def _orphans() -> list[int]:
    """Returns ranks whose first one has gone."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdecimal() and b"engine.worker.rank" in (folder / "cmdline").read_bytes():
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == 1:
                    found.append(int(folder.name))
    return found
