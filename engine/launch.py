"""Starts the processes of an engine. Imports next to nothing, so that a server can do it before its own imports."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engine.ipc.step_mark import StepMark

if TYPE_CHECKING:
    from engine.settings import EngineSettings


class Begun:
    """Holds a process that was started before its settings are known. Once configured, it imports what it needs and
    loads; until a `Child` takes it, its reports wait in its socket."""

    def __init__(self, kind: str = "fake") -> None:
        """`kind`: what it will probably load; a model's imports begin at once. Raises OSError."""
        self._socket, theirs = socket.socketpair()
        try:
            with theirs, _step_mark() as (fd, self._mark):
                self._process = _launch(theirs.fileno(), fd, kind)
        except OSError:
            self._socket.close()
            raise
        self._taken = False
        self.configured = False

    def tell(self, settings: EngineSettings) -> None:
        from engine.ipc.frames import configure
        from engine.ipc.framing import encode  # while the process starts

        self.configured = True
        with contextlib.suppress(OSError):  # it has ended, which who takes it will see
            self._socket.sendall(encode(configure(settings)))

    def take(self) -> tuple[socket.socket, subprocess.Popen[bytes], StepMark]:
        """Transfers the process to the caller, which must end it."""
        self._taken = True
        return self._socket, self._process, self._mark

    def end(self) -> None:
        """Ends the process unless it was taken."""
        if not self._taken:
            self._socket.close()
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def _step_mark() -> Iterator[tuple[int, StepMark]]:
    """Yields a fresh mark, and the descriptor for the other end."""
    fd = StepMark.create()
    try:
        yield fd, StepMark(fd)
    finally:
        os.close(fd)


def launch_rank(fd: int, gpu: int, here: int) -> subprocess.Popen[bytes]:
    """Starts a rank that has its connection to the first one in `fd`. `gpu`: its number on this host, of `here`."""
    given = ["--fd", str(fd), "--parent", str(os.getpid()), "--gpu", str(gpu), "--here", str(here)]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "engine.worker.rank", *given],
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=[fd],
        env=_environment(),
    )


def _launch(fd: int, mark: int, kind: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "engine.worker.process"),
            *("--fd", str(fd), "--step-mark", str(mark), "--parent", str(os.getpid()), "--kind", kind),
        ],
        stdin=subprocess.DEVNULL,
        stdout=2,  # stdout is the front's
        pass_fds=[fd, mark],
        env=_environment(),
        start_new_session=True,  # a terminal's ctrl-C is the front's to handle
    )


def _environment() -> dict[str, str]:
    """Returns the environment of an interpreter with `-P`, which ignores the working folder: there another package may
    be named `engine`."""
    found = dict(os.environ)
    home = Path(__file__).resolve().parents[1]
    if home.name not in ("site-packages", "dist-packages"):
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(home), found.get("PYTHONPATH")]))
    # Threads that spin for each other stop one another dead wherever cores are fewer than those that want them, and the
    # front wants one (docs/measurements/engine-cpu.md).
    found.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    found.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # reads of all that is installed whether it has one
    return found
