"""The first rank's hold on the processes of the other ranks: starts them, sends them orders, and ends with them.

A group lives and dies as one. Where a rank ends or gives no sign of life, the first one ends too, and the front starts
another engine process as after any death; where the first one ends, the kernel ends the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from engine.errors import EngineFailed, InvalidModel, Unsupported
from engine.loading.progress import Progress
from engine.model.split import Part
from engine.settings import EngineSettings
from engine.worker.group import (
    Gloo,
    Join,
    Meet,
    Order,
    PingRank,
    RankLink,
    RankLoaded,
    RankReady,
    RankRefused,
    Reply,
)

_log = logging.getLogger(__name__)
_LOOKS: Final = 16  # at the others in a hang timeout; one is found hung in the last of them
_LOOK: Final = 0.5  # seconds between two while they load
_REAPED: Final = 0.2  # seconds, for one whose end of the socket is closed
_GRACE: Final = 2.0  # seconds, for one that is asked to go


class Ranks:
    """Ranks 1 and up, as the first one has them. Is made on the thread that lives as long as the process, since the
    kernel ends them with it."""

    def __init__(
        self,
        settings: EngineSettings,
        ranks: int,
        lost: Callable[[int], None] | None = None,
        *,
        on_gpus: bool = False,
    ) -> None:
        """`on_gpus`: each rank has the GPU of its number. `lost`: is called once where the group cannot go on, with the
        signal that ended a rank, or 0; None: this process ends at once, in the same way."""
        self.part = Part(0, ranks, splits_vocabulary=not on_gpus)
        self._folder: Path | None = None
        self._timeout = settings.hang_timeout
        self._ended = _exit if lost is None else lost
        self._closing = threading.Event()
        self._losing = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._locks = [threading.Lock() for _ in range(1, ranks)]
        self._others: list[_Other] = []
        try:
            for rank in range(1, ranks):
                self._others.append(_Other(settings, rank, ranks, on_gpus))
        except BaseException:
            self.close()
            raise

    @property
    def others(self) -> Ranks:
        """Returns itself, through which the first rank sends its orders."""
        return self

    @property
    def pids(self) -> tuple[int, ...]:
        """Returns the processes of ranks 1 and up."""
        return tuple(one.process.pid for one in self._others)

    def meet(self, progress: Progress) -> Gloo:
        """Waits until the others have loaded, and connects all. Raises InvalidModel, Unsupported or EngineFailed."""
        for at, one in enumerate(self._others):
            progress("ranks", at, len(self._others))
            one.wait_loaded(partial(progress, "ranks", at, len(self._others)))
        folder = self._folder = Path(tempfile.mkdtemp(prefix="whippet-ranks-"))  # for the owner alone
        try:
            self.send(Meet(str(folder)))
            exchange = Gloo(self.part, folder, self._timeout)
        except RuntimeError as error:
            raise EngineFailed(f"the ranks could not meet: {error}") from error
        self._watcher.start()
        return exchange

    def met(self) -> None:
        """All ranks are connected."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, order: Order) -> None:
        """Sends an order to every other rank."""
        try:
            for one, lock in zip(self._others, self._locks, strict=True):
                with lock:
                    one.link.send(order)
        except OSError as error:
            self.lost(f"rank {one.rank} cannot be reached: {error}")
            raise EngineFailed("a rank is gone") from error

    def lost(self, reason: str) -> None:
        """Ends the group, once. A second caller waits: what it would do next, such as to report its failed step, must
        not come before the end of the process."""
        with self._losing:
            if not self._closing.is_set():
                self._closing.set()
                _log.error("the group of %d ranks ends: %s", self.part.ranks, reason)
                self._ended(next((number for one in self._others if (number := one.killed_by())), 0))

    def close(self) -> None:
        """Ends the other ranks."""
        self.met()
        self._closing.set()
        for one in self._others:
            one.link.shut()  # wakes the rank, and the watcher
        if self._watcher.is_alive():
            self._watcher.join()
        for one in self._others:
            one.end()

    def _watch(self) -> None:
        """Pings the others, whether or not there is work. Looks are counted, not seconds, so that a process that was
        itself held up does not mistake that for a hang."""
        silent = [0] * len(self._others)
        poll = select.poll()
        for one in self._others:
            poll.register(one.link, select.POLLIN)
        while not self._closing.is_set():
            until = time.monotonic() + self._timeout / _LOOKS
            self._ping()
            while not self._closing.is_set() and (left := until - time.monotonic()) > 0:
                came = {fd for fd, _ in poll.poll(max(1, round(left * 1000)))}
                for at, one in enumerate(self._others):
                    if one.link.fileno() in came:
                        silent[at] = 0
                        self._hear(one)
            silent = [looks + 1 if one.idle() else 0 for looks, one in zip(silent, self._others, strict=True)]
            for at, looks in enumerate(silent):
                if looks >= _LOOKS:
                    self.lost(f"rank {self._others[at].rank} gave no sign of life for {self._timeout:g} s")

    def _ping(self) -> None:
        for one, lock in zip(self._others, self._locks, strict=True):
            if lock.acquire(blocking=False):  # else a message is on its way anyhow
                with contextlib.suppress(OSError):
                    one.link.send_if_room(PingRank())
                lock.release()

    def _hear(self, one: _Other) -> None:
        try:
            if isinstance(one.link.receive(), RankReady):
                one.ready = True
        except (EOFError, OSError):
            if not self._closing.is_set():
                self.lost(f"rank {one.rank} has ended{one.how()}")


class _Other:
    """The process of one rank."""

    def __init__(self, settings: EngineSettings, rank: int, ranks: int, on_gpus: bool) -> None:
        ours, theirs = socket.socketpair()
        self.rank = rank
        self.ready = False
        self._worked: str | None = None
        self.link = RankLink(ours, Reply)
        with theirs:
            self.process = _launch(theirs.fileno())
        self.link.send(Join(settings, rank, ranks, on_gpus))

    def idle(self) -> bool:
        """Returns whether the rank should have answered: it obeys orders, or computed nothing since it was last
        looked at."""
        before, self._worked = self._worked, _processor_time(self.process.pid)
        return self.ready or before == self._worked

    def wait_loaded(self, working: Callable[[], None]) -> None:
        """Waits for the rank to load; calls `working` while it computes."""
        poll = select.poll()
        poll.register(self.link, select.POLLIN)
        worked: str | None = None
        while not poll.poll(round(_LOOK * 1000)):
            if (now := _processor_time(self.process.pid)) != worked:
                worked = now
                working()
        try:
            reply = self.link.receive()
        except (EOFError, OSError):
            raise EngineFailed(f"rank {self.rank} ended while it loaded{self.how()}") from None
        match reply:
            case RankLoaded():
                return
            case RankRefused(kind="unsupported", message=message):
                raise Unsupported(message)
            case RankRefused(message=message):
                raise InvalidModel(message)
        raise EngineFailed(f"rank {self.rank} said what it must not before it has loaded")

    def how(self) -> str:
        """Returns how the process ended, in brackets, where that is known by now."""
        try:
            code = self.process.wait(_REAPED)
        except subprocess.TimeoutExpired:
            return ""
        return f" (signal {-code})" if code < 0 else f" (exit code {code})"

    def killed_by(self) -> int:
        """Returns the signal that ended the process; 0 where none did."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return max(0, -self.process.wait(_REAPED))
        return 0

    def end(self) -> None:
        """Waits for the process, whose stream has ended, and kills one that stays."""
        try:
            self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.link.close()


def _launch(fd: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*_interpreter(), "engine.worker.rank", "--fd", str(fd), "--parent", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=[fd],
    )


def _interpreter() -> Sequence[str]:
    return sys.executable, "-P", "-m"


def _processor_time(pid: int) -> str | None:
    """Returns what a process has computed, to be compared; None where the system does not report it."""
    try:
        return " ".join(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15])
    except OSError:
        return None


def _exit(number: int) -> None:
    """Ends this process at once, since another thread of it may wait for a rank that is gone. After a signal it ends
    by the same: the front suspects no request where something outside killed a process."""
    logging.shutdown()
    if number:
        os.kill(os.getpid(), number)
    os._exit(1)
