"""Owns the life of the engine process as the front sees it: start, death, hang, restart, stop."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from dataclasses import dataclass
from typing import Protocol

from engine.api import EngineState, ModelInfo
from engine.client.child import Child
from engine.errors import EngineError, EngineFailed, InvalidModel, Unsupported
from engine.ipc.frames import Command, Progress, Ready, Refused, Report, Step, Switched
from engine.settings import EngineSettings

_log = logging.getLogger(__name__)
_TICKS = 8  # of silence that make a hang
_FIRST_ATTEMPTS = 3  # deaths while loading for the first time after which start() gives up
_STEADY = 60.0  # seconds of readiness after which earlier deaths are forgotten
_STOP_GRACE = 5.0  # seconds, for one that is asked to go
_EXIT_GRACE = 1.0  # seconds, for one that goes by itself
_UNKNOWN_LOAD_TIME = 5.0  # seconds, as a retry hint before any load was timed
_OVERDUE = 1.0  # seconds, as a retry hint when it should be ready by now


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before the next start."""

    base: float = 0.25  # seconds
    cap: float = 30.0  # seconds

    def delay(self, failures: int) -> float:
        """Doubles with every failure in a row; half of it is chance, so that many servers do not start as one."""
        whole = min(self.cap, self.base * 2.0 ** min(failures - 1, 30))
        return whole * random.uniform(0.5, 1.0)


class Listener(Protocol):
    """Who is told."""

    @property
    def busy(self) -> bool:
        """Whether the engine owes an answer."""

    def on_ready(self, info: ModelInfo) -> None:
        """An engine can be used from now on."""

    def on_lost(self, retry_after: float) -> None:
        """It cannot be used any more, and whatever it had is lost. Another may be ready in so many seconds."""

    def on_progress(self, progress: Progress) -> None:
        """It is loading."""

    def on_report(self, report: Step | Switched) -> None:
        """It has said something else."""


class Supervisor:
    """Keeps one engine process alive."""

    def __init__(self, settings: EngineSettings, listener: Listener, hang_timeout: float, backoff: Backoff) -> None:
        self.state = EngineState.STOPPED
        self.restarts = 0
        self._settings = settings
        self._listener = listener
        self._hang_timeout = hang_timeout
        self._backoff = backoff
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self._refusal: EngineError | None = None
        self._load_time: float | None = None
        self._spawned_at = 0.0
        self._ready_at: float | None = None  # of the present process
        self._next_spawn = 0.0
        self._deaths = 0  # in a row

    @property
    def retry_after(self) -> float:
        """Seconds until it will probably be ready, by what the last load took; if that is over, a guess."""
        took = _UNKNOWN_LOAD_TIME if self._load_time is None else self._load_time
        left = max(self._next_spawn, self._spawned_at) + took - time.monotonic()
        return left if left > 0.1 else _OVERDUE

    @property
    def pid(self) -> int | None:
        """Of the present process."""
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """Returns once it is ready for the first time; from then on it is kept so."""
        if self._task is not None:
            raise RuntimeError("an engine is started once")
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.state = EngineState.LOADING
        self._task = asyncio.create_task(self._supervise(first))
        self._task.add_done_callback(self._unsupervised)
        await asyncio.wait([first, self._task], return_when=asyncio.FIRST_COMPLETED)
        await (first if first.done() else self._task)

    def send(self, command: Command) -> None:
        """To the present process. Lost where there is none, as it would be with the process."""
        if self._child is not None:
            self._child.send(command)

    async def close(self) -> None:
        """Ends the process, by asking first."""
        self.state = EngineState.STOPPED
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _supervise(self, first: asyncio.Future[None]) -> None:
        while True:
            how = await self._live(first)
            if not first.done() and (error := self._hopeless(how)) is not None:
                first.set_exception(error)
                return
            delay = max(0.0, self._next_spawn - time.monotonic())
            _log.error("the engine process %s; another is started in %.1f s", self._refusal or how, delay)
            await asyncio.sleep(delay)
            self.restarts += 1

    def _unsupervised(self, task: asyncio.Task[None]) -> None:
        """Nobody starts another process any more: closed, refused, or a fault of ours."""
        self.state = EngineState.STOPPED
        if not task.cancelled() and task.exception() is not None:
            _log.critical("the engine is no longer supervised", exc_info=task.exception())
            self._listener.on_lost(self.retry_after)

    async def _live(self, first: asyncio.Future[None]) -> str:
        """One process from start to end; how it ended."""
        self._spawned_at, self._ready_at, self._refusal = time.monotonic(), None, None
        try:
            child = await Child.spawn(self._settings, functools.partial(self._report, first))
        except OSError as error:
            self._lose()
            return f"could not be started: {error}"
        self._child = child
        grace = 0.0
        try:
            hung = await self._watch(child)
            grace = 0.0 if hung else _EXIT_GRACE
            self._lose()
        except asyncio.CancelledError:
            grace = 0.0 if self._ready_at is None else _STOP_GRACE  # while loading it does not listen
            raise
        finally:
            self._child = None
            how = await child.end(grace)
        return f"was silent for {self._hang_timeout} s" if hung else how

    async def _watch(self, child: Child) -> bool:
        """Until the process has closed its socket, or (True) has been silent for too long while it had work.

        Silence is counted in ticks, so that an event loop that was itself held up does not take that for a hang.
        """
        silent = 0
        while not child.closed.done():
            await asyncio.wait([child.closed], timeout=self._hang_timeout / _TICKS)
            silent = 0 if child.heard or not self._listener.busy else silent + 1
            child.heard = False
            if silent > _TICKS:
                return True
        return False

    def _lose(self) -> None:
        """Tells at once, before the process is quite gone."""
        now = time.monotonic()
        steady = self._ready_at is not None and now - self._ready_at > _STEADY
        self._deaths = 1 if steady else self._deaths + 1
        self._next_spawn = now + self._backoff.delay(self._deaths)
        if self.state is EngineState.READY:
            self.state = EngineState.RESTARTING
            self._listener.on_lost(self.retry_after)

    def _hopeless(self, how: str) -> EngineError | None:
        """What start() raises, if another attempt is no use."""
        if self._refusal is not None:
            return self._refusal
        if self._deaths < _FIRST_ATTEMPTS:
            return None
        return EngineFailed(f"the engine process {how} while loading, {self._deaths} times in a row; see its log above")

    def _report(self, first: asyncio.Future[None], report: Report) -> None:
        match report:
            case Step() | Switched():
                self._listener.on_report(report)
            case Progress():
                self._listener.on_progress(report)
            case Ready(info=info):
                self._ready_at = time.monotonic()
                self._load_time = self._ready_at - self._spawned_at
                self.state = EngineState.READY
                self._listener.on_ready(info)
                if not first.done():
                    first.set_result(None)
            case Refused(kind=kind, message=message):
                self._refusal = InvalidModel(message) if kind == "invalid_model" else Unsupported(message)
