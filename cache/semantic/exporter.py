"""Finds the exported embedder, or makes it in another process: half a minute in libraries that hold the interpreter and
cannot be interrupted would let streams stutter."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

from cache.semantic.apart import command, environment
from cache.semantic.export import PATIENCE, SAYS, ExportFailed, cache_folder, default_source, found, new_work

log = logging.getLogger(__name__)

_REMOVALS = 100  # tries to remove the folder of a process that was killed
_BETWEEN = 0.05  # seconds between two of them


class Exporter:
    """`exported` blocks, in a thread; `stop` ends it from another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def exported(self, source: Path | None = None) -> Path:
        """Raises ExportFailed, also where it was stopped."""
        folder = source or default_source()
        if (made := found(folder)) is None:
            log.info("cache: exporting the embedder, once")
            self._export(folder, new_work(cache_folder()))
            made = found(folder)
        if made is None:
            raise ExportFailed("the exported embedder is not where it was put")
        return made

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._process is not None and self._process.poll() is None:
                _kill(self._process)

    def _export(self, source: Path, work: Path) -> None:
        with self._lock:
            if self._stopped:
                raise ExportFailed("it was stopped")
            process = self._process = subprocess.Popen(
                command("cache.semantic.export", str(source), "--work", str(work)),
                env={**environment(), "TMPDIR": str(work)},  # a compiler's files go with the rest
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # what it starts is killed with it
            )
        output = _wait(process).splitlines()
        _remove(work)
        for line in output:
            level, _, message = line.partition(" ")
            if level == "WARNING" and message.startswith("cache: "):
                log.warning("%s", message)
        if process.returncode:
            why = next((line.removeprefix(SAYS) for line in reversed(output) if line.startswith(SAYS)), None)
            raise ExportFailed(why or f"the process that exports it ended with {process.returncode}")


def _wait(process: subprocess.Popen[str]) -> str:
    """Returns what the process wrote to stderr, once it has ended; one that takes too long is killed."""
    try:
        return process.communicate(timeout=2 * PATIENCE)[1]
    except subprocess.TimeoutExpired:
        _kill(process)
        return process.communicate()[1]


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _remove(work: Path) -> None:
    """Removes the folder that a killed process leaves, in which one that it started may still finish a system call."""
    for _ in range(_REMOVALS):
        shutil.rmtree(work, ignore_errors=True)
        if not work.exists():
            return
        time.sleep(_BETWEEN)
    log.warning("cache: %s cannot be removed", work)
