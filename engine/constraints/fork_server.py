"""`python -m engine.constraints.fork_server --fd N`: loads the vocabulary once and forks the processes that follow
grammars, which have it at once. Runs no grammar itself, and no thread, so that a fork is sound.

A process that it forks serves one caller, one command after another. It dies of what goes beyond its bounds, and of
what the library does not survive: processor time by a timer's signal, memory by a limit. Nothing outlives the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import socket
from pathlib import Path

from engine.constraints.bounds import STACK, on_own_stack
from engine.constraints.budget import Budget
from engine.constraints.following import Following
from engine.constraints.grammars import Grammars
from engine.constraints.heap import Heap
from engine.constraints.messages import (
    MAX_PACKET,
    Begin,
    Command,
    Configure,
    Ended,
    Fork,
    Frames,
    Kill,
    Loaded,
    LookAhead,
    News,
    Unloadable,
    decode_order,
    encode,
    frame,
)

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_OOM_SCORE = 500  # where memory runs out, these go before the engine and the front
_NICE = 10  # the step loop and the streams go first where cores are few
_DESCRIPTORS = 64
_CHUNK = 256 * 1024  # bytes
NO_MEMORY = 3  # exit code


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    given = parser.parse_args()
    _die_with_parent()
    with socket.socket(fileno=given.fd) as engine, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        configure = decode_order(engine.recv(MAX_PACKET))
        if not isinstance(configure, Configure):
            raise TypeError("the first message configures")
        grammars = Grammars(configure.folder)
        try:
            size = len(grammars.matcher("start: /[a-z]*/").compute_bitmask())
        except Exception as error:
            engine.send(encode(Unloadable(f"{type(error).__name__}: {error}"[:1000])))
            return
        gc.collect()
        gc.freeze()  # a collection in a process that was forked would copy every page of it
        engine.send(encode(Loaded(size)))
        _Server(engine, grammars, configure).run()


class _Server:
    """Forks and reaps."""

    def __init__(self, engine: socket.socket, grammars: Grammars, configure: Configure) -> None:
        self._engine = engine
        self._grammars = grammars
        self._configure = configure
        self._pids: dict[int, int] = {}  # number → process, until it is reaped
        self._wake, self._wakes = socket.socketpair()

    def run(self) -> None:
        """Until the engine has gone."""
        self._wakes.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        while True:
            ready, _, _ = select.select([self._engine, self._wake], [], [])
            if self._wake in ready:
                self._wake.recv(MAX_PACKET)
                self._reap()
            if self._engine in ready and not self._obey():
                return

    def _obey(self) -> bool:
        """One order; False where the engine has gone."""
        data, descriptors, _, _ = socket.recv_fds(self._engine, MAX_PACKET, 1)
        if not data:
            return False
        match decode_order(data):
            case Fork(number=number):
                with socket.socket(fileno=descriptors[0]) as ours:
                    self._fork(number, ours)
            case Kill(number=number) if number in self._pids:
                os.kill(self._pids[number], signal.SIGKILL)  # not reaped, so nobody else has its number
        return True

    def _fork(self, number: int, ours: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError:
            self._report(Ended(number, 1))
            return
        if pid:
            self._pids[number] = pid
            return
        code = 1
        try:
            _die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (self._engine, self._wake, self._wakes):
                inherited.close()
            _confine(self._configure)
            on_own_stack(lambda: _follow(ours, self._grammars, self._configure))
            code = 0
        except MemoryError:
            code = NO_MEMORY
        finally:
            os._exit(code)

    def _reap(self) -> None:
        for number, pid in [*self._pids.items()]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._pids[number]
                self._report(Ended(number, os.waitstatus_to_exitcode(status)))

    def _report(self, news: News) -> None:
        self._engine.send(encode(news))


def _follow(engine: socket.socket, grammars: Grammars, configure: Configure) -> None:
    """Does commands until the engine closes the socket."""
    heap = Heap()
    budget = Budget(of_constraint=configure.of_constraint, of_caller=configure.of_caller)
    following = Following(grammars, budget, heap.used, heap.give_back)
    frames = Frames[Command](Command)
    while data := engine.recv(_CHUNK):
        for command in frames.feed(data):
            seconds = configure.compiling if isinstance(command, Begin) else configure.masking
            if isinstance(command, LookAhead):
                seconds *= len(command.draft)
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
            for answer in following.obey(command):
                engine.sendall(frame(answer))
            signal.setitimer(signal.ITIMER_PROF, 0)


def _confine(configure: Configure) -> None:
    """What a process may have: memory, and nothing that it could write to."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    os.nice(_NICE)
    # What a grammar grows by within one command comes on top of what may be kept; then the process ends.
    more = configure.of_caller + configure.of_constraint + STACK
    data = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = data + more if hard == resource.RLIM_INFINITY else min(data + more, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before it could be told
        os._exit(1)


if __name__ == "__main__":
    main()
