"""Profiles the front's own stacks and the engine's."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine.api import Engine
from engine.errors import EngineUnavailable
from engine.stacks import StackSampler
from service.core.errors import Overloaded, Reason

LONGEST = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class ProcessProfile:
    """Stacks have the form of `engine.stacks`."""

    process: str
    stacks: str
    why_not: str = ""  # why there are none


class Profiler:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._until: float | None = None  # the end of the one that is being taken

    async def take(self, seconds: float) -> tuple[ProcessProfile, ...]:
        """Raises Overloaded where a profile is being taken. Cancelling ends the sampling."""
        now = time.monotonic()
        if self._until is not None:
            raise Overloaded("a profile is being taken", Reason.PROFILE_RUNNING, max(1.0, self._until - now))
        self._until = now + seconds
        try:
            async with asyncio.TaskGroup() as both:
                engine = both.create_task(self._of_engine(seconds))
                front = both.create_task(self._of_front(seconds))
            return front.result(), engine.result()
        finally:
            self._until = None

    async def _of_front(self, seconds: float) -> ProcessProfile:
        sampler = StackSampler(seconds)
        sampler.start()
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            sampler.stop()
            raise
        with ThreadPoolExecutor(1, "profile") as thread:
            return ProcessProfile("front", await asyncio.get_running_loop().run_in_executor(thread, sampler.finish))

    async def _of_engine(self, seconds: float) -> ProcessProfile:
        try:
            return ProcessProfile("engine", await self._engine.profile(seconds))
        except EngineUnavailable as error:
            return ProcessProfile("engine", "", str(error))
