"""Owns the life of the engine process as the front sees it: start, death, hang, restart, stop."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from engine.api import EngineState, ModelInfo
from engine.client.child import Child, oom_kills
from engine.errors import EngineError, EngineFailed, InvalidModel, Unsupported
from engine.ipc.frames import (
    Command,
    LoadProgress,
    LoadRefused,
    PingEngine,
    Pong,
    Profiled,
    Ready,
    Report,
    StepEvents,
    Switched,
    TurnedBack,
)
from engine.ipc.step_mark import MarkedStep
from engine.launch import Begun
from engine.settings import EngineSettings

_log = logging.getLogger(__name__)
_LOOKS = 16  # at an engine in its hang timeout; it is found hung in the last of them
_FIRST_ATTEMPTS = (
    3  # starts that fail in a row, after which start() gives up, and requests wait no longer for a restart
)
_STEADY = 60.0  # seconds of readiness after which earlier deaths are forgotten
_LONGEST_WORK = 10  # hang timeouts for which a process that loads may compute without reporting progress
_STOP_GRACE = 5.0  # seconds, for one that is asked to go
_EXIT_GRACE = 1.0  # seconds, for one that goes by itself
_UNKNOWN_LOAD_TIME = 5.0  # seconds, as a retry hint before any load was timed
_OVERDUE = 0.25  # of the time that loading has taken, as a retry hint when it should be ready by now
_SPREAD = 1.25  # a hint is up to this many times what is expected, so that callers do not return as one
_LONGEST_HINT = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class Backoff:
    base: float = 0.25  # seconds
    cap: float = 30.0  # seconds

    def delay(self, failures: int) -> float:
        """Doubles with every failure in a row; half is chance, so that many servers do not start as one."""
        whole = min(self.cap, self.base * 2.0 ** min(failures - 1, 30))
        return whole * random.uniform(0.5, 1.0)


class EngineListener(Protocol):
    def on_ready(self, info: ModelInfo) -> None:
        """Raises InvalidModel where the engine must not be used: supervision then ends."""

    def on_lost(self) -> None: ...

    def on_death(self, step: MarkedStep | None) -> None:
        """Gets the unfinished step; None where the process was ended from outside."""

    def on_late(self) -> None:
        """Starts keep failing: no request should wait for the next."""

    def on_ended(self) -> None: ...

    def on_progress(self, progress: LoadProgress) -> None:
        pass

    def on_report(self, report: StepEvents | Switched | TurnedBack | Profiled) -> None:
        pass


class Supervisor:
    def __init__(
        self, settings: EngineSettings, listener: EngineListener, backoff: Backoff, begun: Begun | None = None
    ) -> None:
        self.state = EngineState.STOPPED
        self.restarts = 0
        self.deaths = Counter(dict.fromkeys(("not_started", "hung", "ended", "killed", "out_of_memory"), 0))
        self._settings = settings
        self._listener = listener
        self._backoff = backoff
        self._begun = begun
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self._refusal: EngineError | None = None
        self._final: InvalidModel | None = None  # why no other process is started
        self._load_time: float | None = None
        self._spawned_at = 0.0
        self._ready_at: float | None = None  # of the present process
        self._next_spawn = 0.0
        self._failed_starts = 0  # in a row
        self._deaths = 0  # since one was steady, or the beginning
        self._ill_since = 0.0  # the first of them

    @property
    def retry_after(self) -> float:
        """Seconds until it will probably be ready, by the last load's time, with a random part."""
        now = time.monotonic()
        under_way = self.state in (EngineState.LOADING, EngineState.RESTARTING)
        begins = max(self._next_spawn, self._spawned_at) if under_way else now
        took = _UNKNOWN_LOAD_TIME if self._load_time is None else self._load_time
        expected = max(begins + took - now, _OVERDUE * max(took, now - begins))
        return min(_LONGEST_HINT, expected * random.uniform(1.0, _SPREAD))

    @property
    def alive(self) -> bool:
        """Whether an absent engine may be expected. False once restarts have ended, or none was ready for a minute
        since two or more have died in `engine.give_up` seconds."""
        if self._task is None or self.state is EngineState.READY:
            return True
        give_up = self._settings.give_up
        failing = self._deaths > 1 and 0 < give_up <= time.monotonic() - self._ill_since
        return not (failing or self._task.done())

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """Returns once it is ready for the first time."""
        if self._task is not None:
            raise RuntimeError("an engine is started once")
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.state = EngineState.LOADING
        self._task = asyncio.create_task(self._supervise(first))
        self._task.add_done_callback(self._unsupervised)
        await asyncio.wait([first, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            await self._task

    async def ended(self) -> None:
        """Raises what ended restarts."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def send(self, command: Command) -> None:
        """Drops commands where there is no process: their effect would be lost with it."""
        if self._child is not None:
            self._child.send(command)

    def kill(self) -> None:
        """A `close` before or after need not wait for the process."""
        if self._child is not None:
            self._child.kill()

    async def close(self) -> None:
        self.state = EngineState.STOPPED
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _supervise(self, first: asyncio.Future[None]) -> None:
        while True:
            how = await self._live(first)
            error = self._final if first.done() else self._final or self._hopeless(how)
            if error is not None:
                raise error
            delay = max(0.0, self._next_spawn - time.monotonic())
            _log.error("the engine process %s; another is started in %.1f s", self._refusal or how, delay)
            await asyncio.sleep(delay)
            self.restarts += 1

    def _unsupervised(self, task: asyncio.Task[None]) -> None:
        self.state = EngineState.STOPPED
        if task.cancelled() or task.exception() is None:
            return
        if not isinstance(task.exception(), EngineError):  # which is raised where it is awaited
            _log.critical("the engine is no longer supervised", exc_info=task.exception())
        self._listener.on_ended()

    async def _live(self, first: asyncio.Future[None]) -> str:
        self._spawned_at, self._ready_at, self._refusal = time.monotonic(), None, None
        short_of_memory = oom_kills()
        begun, self._begun = self._begun, None
        try:
            child = await Child.spawn(self._settings, functools.partial(self._report, first), begun)
        except OSError as error:
            self._lose()
            self.deaths["not_started"] += 1
            return f"could not be started: {error}"
        self._child = child
        grace = 0.0
        try:
            silence = await self._watch(child)
            grace = _EXIT_GRACE if silence is None else 0.0
            self._lose()
        except asyncio.CancelledError:
            grace = 0.0 if self._ready_at is None else _STOP_GRACE  # while loading it does not listen
            raise
        finally:
            code = await child.end(grace)
            self._child = None
        why = "hung" if silence is not None else "ended" if code != -signal.SIGKILL else "killed"
        if why == "killed" and oom_kills() != short_of_memory:
            why = "out_of_memory"
        self.deaths[why] += 1
        self._listener.on_death(None if why == "killed" else child.last_step())
        if silence is not None:
            return f"gave no sign of life for {silence:.1f} s"
        return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"

    async def _watch(self, child: Child) -> float | None:
        """Waits until the process has closed its socket, or has given no sign of life for the hang timeout: then
        returns how long. While it loads, processor time counts as life, for ten times as long.

        A ready process is pinged at every poll, so that silence does not depend on load. Polls are counted, not
        seconds, so that an event loop that was itself held up reports no hang.
        """
        interval = self._settings.hang_timeout / _LOOKS
        alive_at = heard_at = time.monotonic()
        missed = worked = 0  # looks
        while not child.closed.done():
            if self._ready_at is not None:
                child.send(PingEngine())
            await asyncio.wait([child.closed], timeout=interval)
            if child.was_heard():
                missed = worked = 0
                alive_at = heard_at = time.monotonic()
            elif self._ready_at is None and child.has_worked():
                missed, alive_at = 0, time.monotonic()
                worked += 1
            else:
                missed += 1
            if missed == _LOOKS - 1:  # the last sign may be as old as one look more
                return time.monotonic() - alive_at
            if worked == _LONGEST_WORK * _LOOKS:
                return time.monotonic() - heard_at
        return None

    def _steady(self, now: float) -> bool:
        return self._ready_at is not None and now - self._ready_at > _STEADY

    def _lose(self) -> None:
        now = time.monotonic()
        if self._steady(now) or not self._deaths:
            self._deaths, self._ill_since = 0, now
        self._deaths += 1
        self._failed_starts = 0 if self._ready_at is not None else self._failed_starts + 1
        self._next_spawn = now + self._backoff.delay(max(1, self._failed_starts))
        if self.state is EngineState.READY:
            self.state = EngineState.RESTARTING
            self._listener.on_lost()
        elif self._failed_starts == _FIRST_ATTEMPTS:
            self._listener.on_late()

    def _hopeless(self, how: str) -> EngineError | None:
        if self._refusal is not None:
            return self._refusal
        if self._failed_starts < _FIRST_ATTEMPTS:
            return None
        times = f"{self._failed_starts} times in a row"
        return EngineFailed(f"the engine process {how} while loading, {times}; see its log above")

    def _report(self, first: asyncio.Future[None], report: Report) -> None:
        match report:
            case StepEvents() | Switched() | TurnedBack() | Profiled():
                self._listener.on_report(report)
            case LoadProgress():
                self._listener.on_progress(report)
            case Ready(info=info):
                self._ready(first, info)
            case LoadRefused(kind=kind, message=message):
                self._refusal = InvalidModel(message) if kind == "invalid_model" else Unsupported(message)
            case Pong():
                pass  # it was heard

    def _ready(self, first: asyncio.Future[None], info: ModelInfo) -> None:
        try:
            self._listener.on_ready(info)
        except InvalidModel as error:
            self._final = error
            if self._child is not None:
                self._child.abort()
            return
        self._ready_at = time.monotonic()
        self._load_time = self._ready_at - self._spawned_at
        self.state = EngineState.READY
        if not first.done():
            first.set_result(None)
