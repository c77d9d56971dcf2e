"""The first rank's hold on the processes of the other ranks: starts those of this host, awaits those of others, sends
them orders, and ends with them.

A group lives and dies as one. Where a rank ends or gives no sign of life, the first one ends too, and the front starts
another engine process as after any death; where the first one ends, the kernel ends the others of this host, and those
of other hosts end with their connections.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from engine.errors import EngineFailed
from engine.loading.progress import Progress
from engine.model.split import Part
from engine.settings import EngineSettings
from engine.worker.group import LOOPBACK, Gloo
from engine.worker.meeting import Keys, LinkedStore, file_store
from engine.worker.messages import AskKey, KeyIs, Meet, Order, PingRank, PutKey
from engine.worker.other_rank import AnotherRank, RankElsewhere, RankHere, awaited

_log = logging.getLogger(__name__)
_LOOKS: Final = 16  # at the others in a hang timeout; one is found hung in the last of them


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
        progress: Progress = lambda *_: None,
    ) -> None:
        """`on_gpus`: each rank has the GPU of its number on its host. `lost`: is called once where the group cannot go
        on, with the signal that ended a rank, or 0; None: this process ends at once, in the same way. Awaits ranks of
        other hosts. Raises Unsupported where it cannot."""
        self.part = Part(0, ranks, splits_vocabulary=not on_gpus)
        self.here = ranks - settings.ranks_elsewhere
        self._folder: Path | None = None
        self._keys = Keys()
        self._store: LinkedStore | None = None  # None: a file
        self._timeout = settings.hang_timeout
        self._ended = _exit if lost is None else lost
        self._closing = threading.Event()
        self._losing = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._others: list[AnotherRank] = []
        try:
            for rank in range(1, self.here):
                self._others.append(RankHere(settings, rank, ranks, self.here, on_gpus))
            if settings.ranks_elsewhere:
                waiting = partial(progress, "ranks", 0, settings.ranks_elsewhere)
                self._others.extend(awaited(settings, range(self.here, ranks), ranks, on_gpus, waiting))
        except BaseException:
            self.close()
            raise

    @property
    def others(self) -> Ranks:
        """Returns itself, through which the first rank sends its orders."""
        return self

    @property
    def pids(self) -> tuple[int, ...]:
        """Returns the other processes of this host."""
        return tuple(one.process.pid for one in self._others if isinstance(one, RankHere))

    def meet(self, progress: Progress) -> Gloo:
        """Waits until the others have loaded, and connects all. Raises InvalidModel, Unsupported or EngineFailed."""
        for at, one in enumerate(self._others):
            progress("ranks", at, len(self._others))
            one.wait_loaded(partial(progress, "ranks", at, len(self._others)))
        try:
            exchange = self._connected()
        except RuntimeError as error:
            raise EngineFailed(f"the ranks could not meet: {error}") from error
        if not self._watcher.is_alive():
            self._watcher.start()
        return exchange

    def _connected(self) -> Gloo:
        far = next((one for one in self._others if isinstance(one, RankElsewhere)), None)
        if far is None:
            folder = self._folder = Path(tempfile.mkdtemp(prefix="whippet-ranks-"))  # for the owner alone
            self.send(Meet(str(folder), LOOPBACK))
            return Gloo(self.part, file_store(folder, self.part.ranks), self._timeout, LOOPBACK)
        self._store = LinkedStore(self._keys, self._timeout)
        self._watcher.start()  # hears what the others ask
        self.send(Meet(None, far.link.address))
        return Gloo(self.part, self._store, self._timeout, far.link.address)

    def met(self) -> None:
        """All ranks are connected."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._store is not None:
            self._store.close()

    def send(self, order: Order) -> None:
        """Sends an order to every other rank."""
        try:
            for one in self._others:
                one.link.send(order)
        except OSError as error:
            one.gone = True
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
                        while one.link.buffered:
                            self._hear(one)
            silent = [looks + 1 if one.idle() else 0 for looks, one in zip(silent, self._others, strict=True)]
            for at, looks in enumerate(silent):
                if looks >= _LOOKS:
                    self.lost(f"rank {self._others[at].rank} gave no sign of life for {self._timeout:g} s")

    def _ping(self) -> None:
        for one in self._others:
            with contextlib.suppress(OSError):
                one.link.send_if_room(PingRank())

    def _hear(self, one: AnotherRank) -> None:
        try:
            reply = one.link.receive()
            one.heard(reply)
            match reply:
                case PutKey(key=key, value=value):
                    self._keys.put(key, value)
                case AskKey(key=key):
                    self._keys.tell(key, partial(_answer, one))
        except (EOFError, OSError):
            one.gone = True
            if not self._closing.is_set():
                self.lost(f"rank {one.rank} has ended{one.how()}")


def _answer(one: AnotherRank, value: bytes) -> None:
    """Sends a value to a rank, which may have gone: its closed connection is found by itself."""
    with contextlib.suppress(OSError):
        one.link.send(KeyIs(value))


def _exit(number: int) -> None:
    """Ends this process at once, since another thread of it may wait for a rank that is gone. After a signal it ends
    by the same: the front suspects no request where something outside killed a process."""
    logging.shutdown()
    if number:
        os.kill(os.getpid(), number)
    os._exit(1)
