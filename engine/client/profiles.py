"""Profiles of the engine process, as the front asks for them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from engine.errors import EngineUnavailable
from engine.ipc.frames import Command, EndProfile, Profiled, StartProfile

_LONGEST_STEP = 10.0  # seconds; the answer comes after the step in which it is asked for
_SPARE = 5.0  # seconds that the process goes on where the profile is never ended


class PendingProfiles:
    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._tickets = itertools.count(1)
        self._asked: dict[int, asyncio.Future[str]] = {}

    async def take(self, seconds: float) -> str:
        """Stacks in the form of `engine.stacks`; cancelling ends the sampling. Raises EngineUnavailable."""
        ticket = next(self._tickets)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked[ticket] = answer
        ended = False
        self._send(StartProfile(ticket, seconds + _SPARE))
        try:
            await asyncio.wait((answer,), timeout=seconds)
            self._send(EndProfile(ticket))
            ended = True
            async with asyncio.timeout(_LONGEST_STEP):
                return await answer
        except TimeoutError:
            raise EngineUnavailable(f"the engine sent nothing for {_LONGEST_STEP:g} s", _LONGEST_STEP) from None
        finally:
            del self._asked[ticket]
            if not ended:
                self._send(EndProfile(ticket))

    def settle(self, report: Profiled) -> None:
        answer = self._asked.get(report.ticket)
        if answer is not None and not answer.done():
            answer.set_result(report.stacks)

    def fail(self, error: Callable[[], EngineUnavailable]) -> None:
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error())
