"""The loop that forks and reaps, and the limits of forked processes.

A fork server loads data once for all its forked processes, runs no thread, so that forking is safe, and leaves none
behind its parent. The front imports this module too, so it does not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

NO_MEMORY = 3  # exit code of a process that found no memory
MAX_PACKET = 64 * 2**10  # bytes of a message between a fork server and its parent
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_OOM_SCORE = "500"  # where memory runs out, these processes go before the front and the engine
_DESCRIPTORS = 64


class ForkServer(ABC):
    def __init__(self, parent: socket.socket) -> None:
        self._parent = parent
        self._pids: dict[int, int] = {}  # key → process, until it is reaped
        self._wake, self._wakes = socket.socketpair()

    @abstractmethod
    def obey(self, order: bytes, descriptors: list[int]) -> None:
        pass

    @abstractmethod
    def ended(self, key: int, code: int) -> bytes:
        """`code`: the exit code, or minus a signal's number."""

    def run(self) -> None:
        self._wakes.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        while True:
            ready, _, _ = select.select([self._parent, self._wake], [], [])
            if self._wake in ready:
                self._wake.recv(MAX_PACKET)
                self._reap()
            if self._parent in ready:
                order, descriptors, _, _ = socket.recv_fds(self._parent, MAX_PACKET, 1)
                if not order:
                    return
                self.obey(order, descriptors)

    def fork(self, key: int, work: Callable[[], None]) -> None:
        try:
            pid = os.fork()
        except OSError:
            self._report(key, 1)
            return
        if pid:
            self._pids[key] = pid
            return
        code = 1
        try:
            die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (self._parent, self._wake, self._wakes):
                inherited.close()
            work()
            code = 0
        except MemoryError:
            code = NO_MEMORY
        finally:
            os._exit(code)

    def kill(self, key: int) -> None:
        """The pid is still its own, because `_pids` holds only unreaped processes."""
        if key in self._pids:
            os.kill(self._pids[key], signal.SIGKILL)

    def _reap(self) -> None:
        for key, pid in [*self._pids.items()]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._pids[key]
                self._report(key, os.waitstatus_to_exitcode(status))

    def _report(self, key: int, code: int) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # then the next read finds the parent gone
            self._parent.send(self.ended(key, code))


def die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os._exit(1)


def confine(memory: int) -> None:
    """Limits this process to `memory` bytes more than it has and a few open files, forbids writing to files, and makes
    it the OOM killer's first choice."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    limit_memory(memory)


def limit_memory(memory: int) -> None:
    """Counts heap and private mappings."""
    status = Path("/proc/self/status").read_text()
    data = int(status.partition("VmData:")[2].split()[0]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = data + memory if hard == resource.RLIM_INFINITY else min(data + memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))  # the hard limit stays, so that a fork may have more
