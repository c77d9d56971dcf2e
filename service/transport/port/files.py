"""Reads files that an operator replaces while the server runs: tokens, certificates."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from service.config.settings import BadSettings

_CHECK_INTERVAL = 1.0  # seconds between two looks
_SETTLED = 0.05  # seconds without a change after which whoever writes is taken to be done
_LOOKS = 40  # that a file which keeps changing is waited for
_DAY = 86_400.0  # seconds between two reminders
_log = logging.getLogger(__name__)

_Stamp = tuple[int, int, int] | None  # modification time, size and inode of what the links lead to; None: nothing


class NoFile(Exception):
    """The path is not a readable file of a bounded size. One line."""


def read_file(path: Path, most: int) -> bytes:
    """Does not wait for a writer, as a FIFO would. Raises OSError or NoFile."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NoFile("is no file")
        data = file.read(most + 1)
    if len(data) > most:
        raise NoFile(f"is larger than {most >> 20} MiB")
    return data


class FileWatch:
    """Reads changed files in a thread, so that no caller waits for that. Looks through links: a folder that Kubernetes
    swaps is a change."""

    def __init__(self, name: str, paths: Sequence[Path], read: Callable[[], None], remind: Callable[[], None]) -> None:
        """Made before the first reading, and `start`ed after it. `read` raises BadSettings; `remind`, called after each
        reading and every day, warns of expiry."""
        self.failures = 0  # readings that have put nothing into force
        self._name = name
        self._paths = tuple(paths)
        self._read = read
        self._remind = remind
        self._seen = self._stamps()
        self._asked = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._follow, name=self._name, daemon=True).start()

    def ask(self) -> None:
        self._asked.set()

    def _follow(self) -> None:
        self._guarded(self._remind)
        reminded = time.monotonic()
        while True:
            asked = self._asked.wait(_CHECK_INTERVAL)
            self._asked.clear()
            changed = asked or self._stamps() != self._seen
            if changed:
                self._seen = self._settled()
                self.failures += not self._guarded(self._read)
            if changed or time.monotonic() - reminded > _DAY:
                self._guarded(self._remind)
                reminded = time.monotonic()

    def _guarded(self, work: Callable[[], None]) -> bool:
        """An unexpected error must not end the thread."""
        try:
            work()
            return True
        except Exception as error:
            reason = error if isinstance(error, BadSettings) else type(error).__name__
            _log.error("the old %s stay in force: %s", self._name, reason)
            return False

    def _settled(self) -> tuple[_Stamp, ...]:
        """Returns the stamps once they change no more. A change during the read is found by the next poll."""
        before = self._stamps()
        for _ in range(_LOOKS):
            time.sleep(_SETTLED)
            now = self._stamps()
            if now == before:
                break
            before = now
        return before

    def _stamps(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)
