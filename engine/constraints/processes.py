"""Manages the processes that follow grammars: which caller has which process, which commands are unanswered, and how
each process ended. Between `start` and `close` only `wait` blocks, for at most its seconds."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from engine.constraints.budget import Budget
from engine.constraints.forks import MAX_PACKET, NO_MEMORY
from engine.constraints.messages import (
    Advanced,
    Answer,
    Command,
    ConfigureConstraints,
    ForkProcess,
    KillProcess,
    News,
    Order,
    ProcessEnded,
    VocabularyLoaded,
    VocabularyUnloadable,
    answer_reader,
    decode_news,
    encode,
)
from engine.constraints.reasons import ConstraintReason
from engine.ipc import framing
from engine.ipc.framing import FrameError, FrameReader

_log = logging.getLogger(__name__)
_CHUNK = 1 << 20  # bytes
_AGAIN = 10.0  # seconds after which a vocabulary that could not be loaded is tried again
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE")
_ENDS = 5.0  # seconds after which a fork server that does not end is killed
_BUSY = 4  # sequences in each process of a caller at which the caller gets another process


class ProcessListener(Protocol):
    def on_answer(self, process: ConstraintProcess, answer: Answer) -> None:
        pass

    def on_end(self, process: ConstraintProcess, culprit: int | None, reason: ConstraintReason) -> None:
        """All its sequences are lost. `culprit` is the one whose command it was executing."""


@dataclass(slots=True, eq=False)
class ConstraintProcess:
    number: int
    owner: str
    socket: socket.socket
    frames: FrameReader[Answer]
    unsent: bytearray = field(default_factory=bytearray)
    asked: deque[tuple[int, float]] = field(default_factory=deque)  # key and time of each unanswered command
    keys: set[int] = field(default_factory=set)  # its sequences
    used: int = 0  # bytes of its grammars
    left_at: float = 0.0  # when its last sequence ended
    closed: bool = False  # its socket is closed; the fork server reports how it ended
    verdict: ConstraintReason | None = None  # why `Processes` had it killed


class Processes:
    """Belongs to one thread."""

    def __init__(self, folder: str, budget: Budget, listener: ProcessListener, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._budget = budget
        self._listener = listener
        self._clock = clock
        self._server: subprocess.Popen[bytes] | None = None
        self._news: socket.socket | None = None
        self._stop: weakref.finalize[..., Processes] | None = None
        self._poll = select.poll()
        self._by_fd: dict[int, ConstraintProcess] = {}
        self._all: dict[int, ConstraintProcess] = {}  # by number
        self._last = 0
        self._failed_at = float("-inf")
        self._loaded = False
        self.mask_bytes = 0  # of one mask; 0 until the vocabulary was loaded
        self.unloadable = ""  # why there can be no constraints

    @property
    def live(self) -> tuple[ConstraintProcess, ...]:
        return tuple(one for one in self._all.values() if not one.closed)

    @property
    def used(self) -> int:
        return sum(one.used for one in self._all.values())

    @property
    def pids(self) -> tuple[int, ...]:
        return () if self._server is None else (self._server.pid,)

    def of(self, owner: str) -> ConstraintProcess:
        """The caller's process with the fewest sequences, or a new one. Where no more may be started, a caller without
        one shares the emptiest."""
        own = [one for one in self.live if one.owner == owner]
        least = min(own, key=lambda one: len(one.keys), default=None)
        if least is not None and (len(least.keys) < _BUSY or len(own) >= self._budget.shares):
            return least
        most = self._budget.callers * self._budget.shares
        if len(self.live) >= most and (idle := [one for one in self.live if not one.keys]):
            self.end(min(idle, key=lambda one: one.left_at))
        if len(self.live) < most:
            return self._fork(owner)
        return least or min(self.live, key=lambda one: len(one.keys))

    def ask(self, process: ConstraintProcess, command: Command) -> None:
        """If the process has ended, `on_end` reports that."""
        process.asked.append((command.key, self._clock()))
        process.unsent += framing.encode(command)
        self._flush(process)

    def wait(self, seconds: float) -> None:
        """Waits for at most `seconds` where nothing has arrived."""
        if self._news is None:
            return
        for fd, event in self._poll.poll(seconds * 1000):
            if fd == self._news.fileno():
                self._hear()
                if self._news is None:
                    return
            elif (process := self._by_fd.get(fd)) is not None:
                if event & select.POLLOUT:
                    self._flush(process)
                if event & ~select.POLLOUT:
                    self._receive(process)

    def tidy(self) -> None:
        """Ends long idle processes and kills stuck ones. While all grammars together are too large, ends the one idle
        longest or kills the largest."""
        now = self._clock()
        for process in self.live:
            if not process.keys and not process.asked and now - process.left_at >= self._budget.idle:
                self.end(process)
            elif process.asked and now - process.asked[0][1] >= self._budget.stalled:
                self._kill(process, ConstraintReason.TIME)
        while self.used > self._budget.of_all and self.live:
            idle = [one for one in self.live if not one.keys]
            if idle:
                self.end(min(idle, key=lambda one: one.left_at))
                continue
            self._kill(max(self.live, key=lambda one: one.used), ConstraintReason.MEMORY)

    def leave(self, process: ConstraintProcess, key: int) -> None:
        process.keys.discard(key)
        if not process.keys:
            process.left_at = self._clock()

    def end(self, process: ConstraintProcess) -> None:
        """Closes the socket, at which the process ends."""
        self._close(process)
        process.used = 0
        process.asked.clear()

    def close(self) -> None:
        for process in [*self._all.values()]:
            self._close(process)
        self._all.clear()
        if self._stop is not None:
            self._stop()
        self._news = self._server = self._stop = None
        self._poll = select.poll()

    # The fork server

    def start(self) -> bool:
        """False where the start fails, or the last one failed less than _AGAIN seconds ago."""
        if self._news is not None:
            return True
        if self._clock() - self._failed_at < _AGAIN:
            return False
        self.unloadable, self._loaded = "", False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._server = _launch(theirs.fileno())
        except BaseException as error:
            ours.close()
            if not isinstance(error, OSError):
                raise
            self._unloaded(f"its process could not be started: {error}")
            return False
        self._news = ours
        self._stop = weakref.finalize(self, _stop, ours, self._server, self._all)
        budget = self._budget
        configure = ConfigureConstraints(
            self._folder,
            budget.compiling,
            budget.masking,
            budget.of_constraint,
            budget.of_caller // budget.shares,
        )
        self._order(configure)
        self._poll.register(ours, select.POLLIN)
        return True

    def _fork(self, owner: str) -> ConstraintProcess:
        self._last += 1
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        process = ConstraintProcess(self._last, owner, ours, answer_reader(), left_at=self._clock())
        self._all[process.number] = process
        self._by_fd[ours.fileno()] = process
        self._poll.register(ours, select.POLLIN)
        with theirs:
            self._order(ForkProcess(process.number), theirs.fileno())
        return process

    def _order(self, order: Order, *descriptors: int) -> None:
        assert self._news is not None
        with contextlib.suppress(OSError):  # the fork server has ended, which `_hear` finds
            socket.send_fds(self._news, [encode(order)], descriptors)

    def _hear(self) -> None:
        assert self._news is not None
        try:
            data = self._news.recv(MAX_PACKET, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        news: News | None = decode_news(data) if data else None
        match news:
            case VocabularyLoaded(mask_bytes=size):
                self.mask_bytes, self._loaded = size, True
            case VocabularyUnloadable(message=message):
                self._unloaded(message)
            case ProcessEnded(number=number, code=code):
                self._ended(number, code)
            case None:
                self._lost()

    def _unloaded(self, why: str) -> None:
        self.unloadable, self._failed_at = why, self._clock()

    def _lost(self) -> None:
        if not self.unloadable and not self._loaded:
            self._unloaded("its process died while it loaded the vocabulary")
        lost = [*self._all.values()]
        self.close()
        for process in lost:
            self._listener.on_end(process, None, ConstraintReason.DIED)

    # Processes

    def _flush(self, process: ConstraintProcess) -> None:
        if process.closed:
            return
        try:
            sent = process.socket.send(process.unsent) if process.unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError:  # the process has ended, which `_receive` finds
            sent = len(process.unsent)
        del process.unsent[:sent]
        wanted = select.POLLIN | (select.POLLOUT if process.unsent else 0)
        self._poll.modify(process.socket, wanted)

    def _receive(self, process: ConstraintProcess) -> None:
        try:
            data = process.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(process)
        try:
            answers = process.frames.feed(data)
        except FrameError as error:
            _log.error("a process that follows grammars sent a broken message: %s", error)
            self._kill(process, ConstraintReason.DIED)
            return
        for answer in answers:
            if not isinstance(answer, Advanced):
                process.used = answer.used
                if getattr(answer, "answers", True) and process.asked:
                    process.asked.popleft()
            self._listener.on_answer(process, answer)
            if process.closed:
                return

    def _kill(self, process: ConstraintProcess, verdict: ConstraintReason) -> None:
        process.verdict = verdict
        process.used = 0
        self._order(KillProcess(process.number))
        self._close(process)

    def _close(self, process: ConstraintProcess) -> None:
        if process.closed:
            return
        process.closed = True
        del self._by_fd[process.socket.fileno()]
        self._poll.unregister(process.socket)
        process.socket.close()

    def _ended(self, number: int, code: int) -> None:
        process = self._all.pop(number, None)
        if process is None:
            return
        while not process.closed:  # what it sent before its end of the socket was closed
            self._receive(process)
        if not process.keys and not process.asked:
            return
        reason = process.verdict or _reason(code)
        culprit = process.asked[0][0] if process.asked else None
        _log.warning("a process that follows grammars ended with %d (%s)", code, reason)
        self._listener.on_end(process, culprit, reason)


def _stop(news: socket.socket, server: subprocess.Popen[bytes], processes: dict[int, ConstraintProcess]) -> None:
    news.close()
    for process in processes.values():
        process.socket.close()
    try:
        server.wait(_ENDS)
    except subprocess.TimeoutExpired:
        server.kill()  # its children end with it
        server.wait()


def _reason(code: int) -> ConstraintReason:
    if code == -signal.SIGPROF:
        return ConstraintReason.TIME
    return ConstraintReason.MEMORY if code in (NO_MEMORY, -signal.SIGABRT) else ConstraintReason.DIED


def _launch(fd: int) -> subprocess.Popen[bytes]:
    """`-P` has the interpreter ignore the working folder, where another package may be named `engine`."""
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    home = Path(__file__).resolve().parents[2]
    if home.name not in ("site-packages", "dist-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(home), environment.get("PYTHONPATH")]))
    environment |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "engine.constraints.fork_server", "--fd", str(fd)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a library's messages may contain what a caller sent
        pass_fds=[fd],
        env=environment,
    )
