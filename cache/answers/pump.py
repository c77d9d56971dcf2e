"""Runs a generation independently of its readers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing

from cache.api import AnswerPart, Generation, Unfinished

AHEAD = 2048  # parts that it may be ahead of its reader


class Pump:
    """Drives an async generator in a task: for sources that an interrupted `next` would break, or whose readers
    elsewhere must not wait for this one."""

    def __init__(self, source: AsyncGenerator[AnswerPart, None], tasks: set[asyncio.Task[None]]) -> None:
        self._source = source
        self._tasks = tasks  # holds the task while it runs
        self._task: asyncio.Task[None] | None = None
        self._parts: deque[AnswerPart] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._over: Exception | None = None  # what comes after the parts

    async def next(self) -> AnswerPart:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="pump of a generation")
            self._tasks.add(self._task)
            self._task.add_done_callback(self._tasks.discard)
        while not self._parts:
            if self._over is not None:
                raise self._over
            self._news.clear()
            await self._news.wait()
        self._room.set()
        return self._parts.popleft()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._end(StopAsyncIteration())

    async def _run(self) -> None:
        end: Exception = StopAsyncIteration()
        try:
            async with aclosing(self._source) as source:
                async for part in source:
                    self._parts.append(part)
                    self._news.set()
                    while len(self._parts) >= AHEAD:
                        self._room.clear()
                        await self._room.wait()
        except Exception as error:
            end = error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            end = Unfinished("the generation was cancelled")
        finally:
            self._end(end)

    def _end(self, end: Exception) -> None:
        if self._over is None:
            self._over = end
        self._news.set()


async def parts_of(generation: Generation) -> AsyncGenerator[AnswerPart, None]:
    try:
        while True:
            try:
                part = await generation.next()
            except StopAsyncIteration:
                return
            yield part
            if part.ending is not None:
                return
    finally:
        generation.close()
