"""Obeys the front's commands between steps; short requests also while one runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from engine.ipc.frames import Command, Submit
from engine.ipc.framing import FrameError
from engine.ipc.link import EngineLink

_SHORT = 1024  # tokens of a prompt that is taken in within a tenth of a millisecond


class Arrivals:
    def __init__(self, link: EngineLink, obey: Callable[[Command], None]) -> None:
        self._link = link
        self._obey = obey
        self._came = deque[Command]()  # and is not obeyed yet
        self._broken: Exception | None = None  # what the link ended with while a step ran

    def take(self, timeout: float | None) -> None:
        """Obeys arrived commands, waiting `timeout` seconds for one, None forever. EOFError where the front has
        gone."""
        if self._broken is not None:
            raise self._broken
        self._came += self._link.receive(0 if self._came else timeout)
        while self._came:
            self._obey(self._came.popleft())

    def take_early(self) -> bool:
        """Obeys the next command if it is a short request; whether it was. All else waits for the end of the running
        step."""
        if not self._came and self._broken is None:
            try:
                self._came += self._link.receive(0)
            except (EOFError, ConnectionError, FrameError) as error:
                self._broken = error
        match next(iter(self._came), None):
            case Submit(request=request) if len(request.token_ids) <= _SHORT:
                self._obey(self._came.popleft())
                return True
        return False
