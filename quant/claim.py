"""One writer of an output folder at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quant.errors import CannotQuantize


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Raises CannotQuantize where another process has it. The kernel releases what a dead process held: the lock is on
    a file beside the folder, and the rest of that file means nothing."""
    whole = out.resolve()
    path = whole.with_name(f".{whole.name}.writing")
    try:
        whole.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(path, out)
    except OSError as error:
        raise CannotQuantize(f"{path}: {error.strerror}: name a folder that can be written") from error
    try:
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _locked(path: Path, out: Path) -> int:
    """A descriptor of the file that is at `path` now: one that another process has just removed is none."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except BlockingIOError:
            writer = os.read(lock, 20).decode("ascii", "replace") or "another one"
            os.close(lock)
            busy = f"{out} is being written by process {writer}: wait for it, or name another folder"
            raise CannotQuantize(busy) from None
        except FileNotFoundError:  # between the two looks
            pass
        os.close(lock)
