"""Finds the exported embedder, or makes it in another process: half a minute in libraries that hold the interpreter and
cannot be interrupted would let streams stutter."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from cache.semantic.apart import command, environment
from cache.semantic.export import PATIENCE, SAYS, ExportFailed, default_source, found

log = logging.getLogger(__name__)

_LOOK = 0.5  # seconds between two looks at whether it is late
_GRACE = 5.0  # seconds in which an interrupted process may clean up


class Exporter:
    """`exported` blocks, in a thread; `stop` ends it from another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False
        self._late = float("inf")  # when it is ended without asking

    def exported(self, source: Path | None = None) -> Path:
        """Raises ExportFailed, also where it was stopped."""
        folder = source or default_source()
        if (made := found(folder)) is None:
            log.info("cache: exporting the embedder, once")
            self._export(folder)
            made = found(folder)
        if made is None:
            raise ExportFailed("the exported embedder is not where it was put")
        return made

    def stop(self) -> None:
        with self._lock:
            self._stopped, self._late = True, time.monotonic() + _GRACE
            if self._process is not None and self._process.poll() is None:
                _signal(self._process, signal.SIGTERM)

    def _export(self, folder: Path) -> None:
        with self._lock:
            if self._stopped:
                raise ExportFailed("it was stopped")
            self._late = time.monotonic() + 2 * PATIENCE
            process = self._process = subprocess.Popen(
                command("cache.semantic.export", str(folder)),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # what it starts ends with it
            )
        output = self._wait(process).splitlines()
        for line in output:
            level, _, message = line.partition(" ")
            if level == "WARNING" and message.startswith("cache: "):
                log.warning("%s", message)
        if process.returncode:
            why = next((line.removeprefix(SAYS) for line in reversed(output) if line.startswith(SAYS)), None)
            raise ExportFailed(why or f"the process that exports it ended with {process.returncode}")

    def _wait(self, process: subprocess.Popen[str]) -> str:
        while True:
            try:
                return process.communicate(timeout=_LOOK)[1]
            except subprocess.TimeoutExpired:
                if time.monotonic() > self._late:
                    _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[str], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
