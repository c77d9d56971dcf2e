"""The engine's switches: what was requested, what a new process gets, and what was reverted."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable

from engine.api import TRIAL_STEPS, Reverted
from engine.errors import EngineError, Unsupported
from engine.ipc.frames import Command, SetSwitch, Switched
from engine.settings import EngineSettings, switches_of

_log = logging.getLogger(__name__)


class Switching:
    def __init__(self, settings: EngineSettings, send: Callable[[Command], None]) -> None:
        self.reverted: dict[str, Reverted] = {}
        self.reverts = Counter[str]()
        self._send = send
        self._first = switches_of(settings)  # what a process starts with
        self._on = dict(self._first)
        self._tickets = itertools.count(1)
        self._asked: dict[int, tuple[SetSwitch, asyncio.Future[None]]] = {}
        self._trials: dict[str, int] = {}  # the engine's steps when it was changed

    async def set(self, name: str, enabled: bool) -> None:
        """Returns when it is set. Raises EngineError."""
        switch = SetSwitch(next(self._tickets), name, enabled)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked[switch.ticket] = switch, answer
        self._send(switch)
        await answer

    def settle(self, report: Switched) -> None:
        asked = self._asked.pop(report.ticket, None)
        if asked is None:
            if report.refusal is not None:
                _log.warning("a restarted engine would not be switched: %s", report.refusal)
            return
        switch, answer = asked
        if report.refusal is None:
            self.reverted.pop(switch.name, None)
            if self._on.get(switch.name) is not switch.enabled:
                self._trials[switch.name] = report.steps
            self._on[switch.name] = switch.enabled
        if not answer.done():
            if report.refusal is None:
                answer.set_result(None)
            else:
                answer.set_exception(Unsupported(report.refusal))

    def turned_back(self, what: Reverted) -> None:
        self._trials.pop(what.name, None)
        self._on[what.name] = what.enabled
        self.reverted[what.name] = what
        self.reverts[what.name] += 1

    def tell(self) -> None:
        for name, enabled in self._on.items():
            if self._first.get(name) is not enabled:
                self._send(SetSwitch(next(self._tickets), name, enabled))

    def lost(self, steps: int) -> None:
        """Reverts switches on trial when the process died after `steps` steps: they may be the cause."""
        trials, self._trials = self._trials, {}
        for name, since in trials.items():
            if steps - since < TRIAL_STEPS:
                was = "on" if self._on[name] else "off"
                reason = f"the engine process was lost soon after it was turned {was}"
                _log.error("%s is turned %s again: %s", name, "off" if self._on[name] else "on", reason)
                self.turned_back(Reverted(name=name, enabled=not self._on[name], reason=reason))

    def fail(self, error: Callable[[], EngineError]) -> None:
        for _, answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error())
        self._asked.clear()
