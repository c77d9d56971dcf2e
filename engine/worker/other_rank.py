"""One other rank as the first one sees it: a process of this host, or a connection from another host."""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from engine.errors import EngineFailed, InvalidModel, Unsupported
from engine.ipc.joining import Door, JoinRefused, code_digest, read_secret
from engine.launch import launch_rank
from engine.settings import EngineSettings
from engine.worker.messages import (
    Join,
    RankFailed,
    RankLink,
    RankLoaded,
    RankReady,
    RankRefused,
    RankWorking,
    Reply,
)

_log = logging.getLogger(__name__)
_LOOK: Final = 0.5  # seconds between two looks at a rank that loads
_AWAIT: Final = 1.0  # seconds between two signs of life while ranks are awaited
_IMPORTS: Final = 120.0  # seconds until a process that starts says something
_REAPED: Final = 0.2  # seconds, for a process whose end of the socket is closed
_GRACE: Final = 2.0  # seconds, for one that is asked to go


class AnotherRank(ABC):
    """What the first rank does with every other one."""

    def __init__(self, rank: int, link: RankLink) -> None:
        self.rank = rank
        self.link = link
        self.ready = False
        self.gone = False  # its connection has ended

    def heard(self, reply: object) -> None:
        """Applies a message of the rank about itself."""
        if isinstance(reply, RankReady):
            self.ready = True

    def wait_loaded(self, working: Callable[[], None]) -> None:
        """Waits for the rank to load; calls `working` while it computes. Raises InvalidModel, Unsupported or
        EngineFailed."""
        poll = select.poll()
        poll.register(self.link, select.POLLIN)
        while True:
            while not self.link.buffered and not poll.poll(round(_LOOK * 1000)):
                self._look(working)
            try:
                reply = self.link.receive()
            except (EOFError, OSError):
                raise EngineFailed(f"rank {self.rank} ended while it loaded{self.how()}") from None
            self.heard(reply)
            match reply:
                case RankLoaded():
                    return
                case RankWorking():
                    working()
                case RankFailed():
                    raise EngineFailed(f"rank {self.rank} failed while it loaded; its own log says why")
                case RankRefused(kind="unsupported", message=message):
                    raise Unsupported(message)
                case RankRefused(message=message):
                    raise InvalidModel(message)
                case _:
                    raise EngineFailed(f"rank {self.rank} sent a message out of turn while it loaded")

    @abstractmethod
    def _look(self, working: Callable[[], None]) -> None:
        """Is called now and then while the rank loads and says nothing."""

    @abstractmethod
    def idle(self) -> bool:
        """Returns whether the rank should have sent a message since the last call."""

    @abstractmethod
    def how(self) -> str:
        """Returns how the rank ended, in brackets, where that is known by now."""

    @abstractmethod
    def killed_by(self) -> int:
        """Returns the signal that ended the rank; 0 where none did."""

    @abstractmethod
    def end(self) -> None:
        """Waits for the rank, whose stream has ended."""


class RankHere(AnotherRank):
    """A process of this host, which the kernel ends with this one."""

    def __init__(self, settings: EngineSettings, rank: int, ranks: int, here: int, on_gpus: bool) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(rank, RankLink(ours, Reply))
        self._worked: str | None = None
        with theirs:
            self.process = launch_rank(theirs.fileno(), rank, here)
        self.link.send(Join(settings, rank, ranks, on_gpus))

    def _look(self, working: Callable[[], None]) -> None:
        if self._computed():
            working()

    def idle(self) -> bool:
        """Returns True for a rank that obeys orders, since it answers pings, and for one that computed nothing."""
        computed = self._computed()
        return self.ready or not computed

    def _computed(self) -> bool:
        before, self._worked = self._worked, _processor_time(self.process.pid)
        return before != self._worked

    def how(self) -> str:
        try:
            code = self.process.wait(_REAPED)
        except subprocess.TimeoutExpired:
            return ""
        return f" (signal {-code})" if code < 0 else f" (exit code {code})"

    def killed_by(self) -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return max(0, -self.process.wait(_REAPED))
        return 0

    def end(self) -> None:
        """Kills a process that stays."""
        try:
            self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.link.close()


class RankElsewhere(AnotherRank):
    """A process of another host, which says by itself that it computes, and ends with its connection."""

    def __init__(self, settings: EngineSettings, rank: int, ranks: int, sock: socket.socket, on_gpus: bool) -> None:
        super().__init__(rank, RankLink(sock, Reply))
        self.link.keep_alive(settings.hang_timeout)
        self._timeout = settings.hang_timeout
        self._begun = False  # it has said something
        self._silent = 0.0  # seconds
        self._failed = False
        # The first rank alone knows the cache and its keys, and who may join.
        given = replace(settings, shared_tier=None, ranks_secret_file=None)
        self.link.send(Join(given, rank, ranks, on_gpus))

    def heard(self, reply: object) -> None:
        super().heard(reply)
        self._begun, self._silent = True, 0.0
        self._failed |= isinstance(reply, RankFailed)

    def _look(self, working: Callable[[], None]) -> None:
        self._silent += _LOOK
        patience = self._timeout if self._begun else max(self._timeout, _IMPORTS)
        if self._silent >= patience:
            raise EngineFailed(f"rank {self.rank} gave no sign of life for {patience:g} s while it loaded")

    def idle(self) -> bool:
        return True

    def how(self) -> str:
        return " (on another host)"

    def killed_by(self) -> int:
        """Returns SIGKILL for one that is gone and did not report a failure: it was ended from outside."""
        return signal.SIGKILL if self.gone and not self._failed else 0

    def end(self) -> None:
        self.link.close()


def awaited(
    settings: EngineSettings, numbers: Iterable[int], ranks: int, on_gpus: bool, waiting: Callable[[], None]
) -> Iterator[RankElsewhere]:
    """Listens until a rank of another host has come for each of `numbers`, and yields it. Calls `waiting` about every
    second. Raises Unsupported where it cannot listen."""
    assert settings.ranks_listen is not None
    assert settings.ranks_secret_file is not None
    try:
        secret = read_secret(Path(settings.ranks_secret_file))
        door = Door(settings.ranks_listen, secret, code_digest())
    except (OSError, JoinRefused) as error:
        raise Unsupported(f"ranks of other hosts cannot be awaited: {error}") from error
    with contextlib.closing(door):
        for rank in numbers:
            _log.info("rank %d of %d is awaited from another host at %s", rank, ranks, settings.ranks_listen)
            yield RankElsewhere(settings, rank, ranks, _next(door, waiting), on_gpus)


def _next(door: Door, waiting: Callable[[], None]) -> socket.socket:
    while True:
        waiting()
        try:
            if (sock := door.accept(_AWAIT)) is not None:
                return sock
        except JoinRefused as error:
            _log.warning("a connection that wanted to join as a rank was refused: %s", error)


def _processor_time(pid: int) -> str | None:
    """Returns what a process has computed, to be compared; None where the system does not report it."""
    try:
        return " ".join(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15])
    except OSError:
        return None
