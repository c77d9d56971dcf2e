"""The process that text processes are forked from: it loads the tokenizer, and then forks workers, which have it at
once. `python -m service.core.text.fork_server --fd N`.

It never runs a job itself, and no thread, so that a fork is sound. A worker runs one job at a time, under a limit of
memory; the front ends it by key where a job takes too long. Nothing outlives the front: the fork server ends when its
socket closes, and workers when the fork server does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import os
import resource
import select
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from engine.errors import InvalidModel
from service.core.text.control import (
    DONE,
    FAILED,
    HEADER,
    MAX_PACKET,
    MAX_RESULT,
    REFUSED,
    Configure,
    Ended,
    Fork,
    Kill,
    Loaded,
    Report,
    Unloadable,
    decode_command,
    encode,
)
from service.core.text.jobs import Refusal
from service.core.text.tokenizer import Tokenizer

_PR_SET_PDEATHSIG = 1
_OOM_SCORE = "500"  # where memory runs out, these go before the front and the engine
_DESCRIPTORS = 64

Job = Callable[[Tokenizer, bytes], bytes]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    _die_with_parent()
    with socket.socket(fileno=parser.parse_args().fd) as front:
        _serve(front)


def _serve(front: socket.socket) -> None:
    configure = decode_command(front.recv(MAX_PACKET))
    if not isinstance(configure, Configure):
        raise TypeError("the first message configures")
    _limit_memory(configure.memory)
    _silence()
    try:
        tokenizer = Tokenizer.of_bytes() if configure.model is None else Tokenizer.load(configure.model)
        jobs = tuple(_found(kind) for kind in configure.kinds)
    except InvalidModel as error:
        front.send(encode(Unloadable(str(error))))
        return
    except MemoryError:
        front.send(
            encode(Unloadable(_broken(configure.model, f"takes more than {configure.memory >> 20} MiB to load")))
        )
        return
    except BaseException as error:  # a panic in Rust is no Exception
        front.send(encode(Unloadable(_broken(configure.model, f"cannot be loaded ({type(error).__name__})"))))
        return
    gc.collect()
    gc.freeze()  # a collection in a worker would copy every page of it
    _Server(front, tokenizer, jobs).run()


def _broken(model: str | None, problem: str) -> str:
    return f"{model}: its tokenizer or chat template {problem}; copy it again from where the model came from"


class _Server:
    """Forks and reaps."""

    def __init__(self, front: socket.socket, tokenizer: Tokenizer, jobs: tuple[Job, ...]) -> None:
        self._front = front
        self._tokenizer = tokenizer
        self._jobs = jobs
        self._pids: dict[int, int] = {}  # key → process, until it is reaped
        self._wake, self._wakes = socket.socketpair()

    def run(self) -> None:
        """Until the front has gone."""
        self._wakes.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._report(Loaded(self._tokenizer.digest))
        while True:
            ready, _, _ = select.select([self._front, self._wake], [], [])
            if self._wake in ready:
                self._wake.recv(MAX_PACKET)
                self._reap()
            if self._front in ready and not self._obey():
                return

    def _obey(self) -> bool:
        """One command; False where the front has gone."""
        data, descriptors, _, _ = socket.recv_fds(self._front, MAX_PACKET, 1)
        if not data:
            return False
        match decode_command(data):
            case Fork(key=key, memory=memory):
                with socket.socket(fileno=descriptors[0]) as ours:
                    self._fork(key, memory, ours)
            case Kill(key=key) if key in self._pids:
                os.kill(self._pids[key], signal.SIGKILL)  # not reaped, so nobody else has its number
        return True

    def _fork(self, key: int, memory: int, ours: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError:
            self._report(Ended(key, 1))
            return
        if pid:
            self._pids[key] = pid
            return
        code = 1
        try:
            _die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (self._front, self._wake, self._wakes):
                inherited.close()
            _confine(memory)
            _Worker(ours, self._tokenizer, self._jobs).run()
            code = 0
        finally:
            os._exit(code)

    def _reap(self) -> None:
        for key, pid in [*self._pids.items()]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._pids[key]
                self._report(Ended(key, os.waitstatus_to_exitcode(status)))

    def _report(self, report: Report) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # then the next read finds the front gone
            self._front.send(encode(report))


class _Worker:
    """Takes a job, does it, answers."""

    def __init__(self, front: socket.socket, tokenizer: Tokenizer, jobs: tuple[Job, ...]) -> None:
        self._front = front
        self._tokenizer = tokenizer
        self._jobs = jobs

    def run(self) -> None:
        """Until the front has closed the socket."""
        while head := self._read(HEADER.size):
            kind, size = HEADER.unpack(head)
            outcome, result = self._do(self._jobs[kind], self._read(size))
            self._front.sendall(HEADER.pack(outcome, len(result)))
            self._front.sendall(result)

    def _do(self, job: Job, payload: bytes) -> tuple[int, bytes]:
        try:
            result = job(self._tokenizer, payload)
        except Refusal as error:
            return REFUSED, str(error).encode()
        except MemoryError:
            return REFUSED, b"takes more memory to process than is allowed"
        except BaseException as error:  # a panic in Rust is no Exception
            return FAILED, type(error).__name__.encode()
        return (DONE, result) if len(result) <= MAX_RESULT else (REFUSED, b"makes more than can be sent")

    def _read(self, size: int) -> bytes:
        """So many bytes; fewer, where the front has gone."""
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            more = self._front.recv_into(view[got:])
            if not more:
                return b""
            got += more
        return bytes(data)


def _found(kind: str) -> Job:
    module, _, name = kind.partition(":")
    job: Job = getattr(importlib.import_module(module), name)
    return job


def _die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before it could be told
        os._exit(1)


def _silence() -> None:
    """From here on what is to be told is told in messages. A library's own words may hold a prompt."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    os.close(quiet)


def _confine(memory: int) -> None:
    """What a worker may have: memory, and nothing that it could write to."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    _limit_memory(memory)


def _limit_memory(memory: int) -> None:
    """`memory` bytes more than now: heap and private mappings."""
    status = Path("/proc/self/status").read_text()
    data = int(status.partition("VmData:")[2].split()[0]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = data + memory if hard == resource.RLIM_INFINITY else min(data + memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))  # a worker may have more than what loading may take


if __name__ == "__main__":
    main()
