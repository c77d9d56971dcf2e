"""Looks at a server while something is done to it: how long its health takes to answer, and how much memory it has."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_EVERY = 0.02  # seconds
_PATIENCE = 30.0  # seconds until a probe has failed


def rss(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def addresses(log: Path, process: subprocess.Popen[bytes]) -> dict[str, str]:
    """Of a server's four ports, once it says that it is ready."""
    while process.poll() is None:
        said = log.read_text()
        ready = re.search(r"^ready: data (\S+) admin (\S+) health (\S+)", said, re.MULTILINE)
        metrics = re.search(r" metrics http://(\S+)/metrics$", said, re.MULTILINE)
        if ready and metrics:
            return {"data": ready[1], "admin": ready[2], "health": ready[3], "metrics": metrics[1]}
        time.sleep(_EVERY)
    raise RuntimeError(f"the server did not start:\n{log.read_text()}")


class Prober:
    """Asks again and again, from a thread of its own, within a `with` block."""

    def __init__(self, health: str, pid: int) -> None:
        self._health = health
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.waits: list[float] = []  # seconds, of each probe
        self.slowest = 0.0  # on the monotonic clock, when the longest of them began
        self.peak = 0  # bytes

    def __enter__(self) -> Prober:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(_PATIENCE)

    @property
    def worst(self) -> float:
        """Seconds."""
        return max(self.waits, default=_PATIENCE)

    def _run(self) -> None:
        with grpc.insecure_channel(self._health) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            while not self._stop.wait(_EVERY):
                began = time.monotonic()
                try:
                    check(health_pb2.HealthCheckRequest(), timeout=_PATIENCE, wait_for_ready=True)
                except grpc.RpcError:
                    wait = _PATIENCE
                else:
                    wait = time.monotonic() - began
                if wait > max(self.waits, default=0.0):
                    self.slowest = began
                self.waits.append(wait)
                self.peak = max(self.peak, rss(self._pid))
