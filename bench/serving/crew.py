"""The calling processes from outside."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from bench.serving.jobs import Found, Job, Wish, shared_out

_LEAD = 0.3  # seconds between telling a job and its beginning


class Crew:
    """Processes that call one server."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def __len__(self) -> int:
        return len(self._processes)

    def warm(self, vocabulary: int) -> None:
        """Opens their connections, with answers that nobody counts."""
        self.together([Job(time.monotonic(), [Wish(n, 4, 2) for n in range(8)], 4, vocabulary=vocabulary)] * len(self))

    def run(self, job: Job) -> list[Found]:
        """Shared out among all."""
        return self.together(shared_out(job, len(self)))

    def together(self, jobs: Sequence[Job]) -> list[Found]:
        """At once, a process each."""
        told = list(zip(self._processes, jobs, strict=False))
        for process, job in told:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
        return [_answer(process) for process, _ in told]


def _answer(process: subprocess.Popen[bytes]) -> Found:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a calling process ended before its answer")
    return msgspec.json.decode(line, type=Found)


def soon() -> float:
    """When a job that is told now may begin."""
    return time.monotonic() + _LEAD


@contextmanager
def crew(address: str, token: str, processes: int) -> Iterator[Crew]:
    """So many processes; they end with the block."""
    words = [sys.executable, "-m", "bench.serving.caller", address, token]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(processes):
            started.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        yield Crew(started)
    finally:
        for process in started:
            process.kill()
            process.communicate()
