"""Coalesces identical requests in this process into one generation, read by all (single-flight).

A `SharedGeneration` is an append-only log of parts and the generation that fills it. No task drives it: a reader at the
end of the log fetches the next part, unless another is fetching already. So the generation runs as fast as its fastest
reader, and the next reader follows a leader that leaves. When the generation fails, that reader's own way of generating
continues where the log ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from cache.answers.resume import Skipper
from cache.api import BEGUN, LINGER, AnswerPart, CacheKey, Counter, Generate, Generation, LeaderRefused, Unfinished

ATTEMPTS = 2  # a leader and one replacement


class _SharedReader:
    """Reads from the beginning; may come to lead."""

    def __init__(self, shared: SharedGeneration, generate: Generate) -> None:
        self.generate = generate
        self.refusal: LeaderRefused | None = None
        self.at = 0  # parts read
        self.knows_begun = False
        self._shared = shared

    def __aiter__(self) -> _SharedReader:
        return self

    def __anext__(self) -> Coroutine[Any, Any, AnswerPart]:
        return self._shared.next(self)


class SharedGeneration:
    def __init__(self, counter: Counter) -> None:
        self.log: list[AnswerPart] = []
        self.begun = False  # a reader was admitted
        self.over = False
        self.error: Exception | None = None  # for every reader, once it has read the log
        self._counter = counter
        self._readers = 0
        self._candidates: list[_SharedReader] = []  # readers who have not led
        self._leader: _SharedReader | None = None
        self._generation: Generation | None = None  # the leader's
        self._skipper: Skipper | None = None  # of a leader who took over
        self._failures: list[Exception] = []
        self._refusal: LeaderRefused | None = None  # the latest
        self._fetching = False
        self._waiting = 0  # readers who wait for another one's fetch
        self._news = asyncio.Event()

    @property
    def joinable(self) -> bool:
        return self.error is None

    @property
    def busy(self) -> bool:
        return not self.over and self.error is None

    def forget_leader(self) -> None:
        """Ends a cycle of references, or all of the leader's call would wait for a collection."""
        if not self.busy:
            self._leader = None

    def close(self) -> None:
        """Gives readers Unfinished, if it has not ended."""
        if self.busy:
            self.error = Unfinished("the shared generation was ended")
            if self._generation is not None:
                self._generation.close()
            self._wake()

    @asynccontextmanager
    async def reader(self, generate: Generate) -> AsyncIterator[AsyncIterator[AnswerPart]]:
        reader = _SharedReader(self, generate)
        self._readers += 1
        self._candidates.append(reader)
        try:
            yield reader
        finally:
            self._readers -= 1
            if reader in self._candidates:
                self._candidates.remove(reader)
            if self._readers == 0:
                self.close()

    async def next(self, reader: _SharedReader) -> AnswerPart:
        """Raises StopAsyncIteration after the ending. One method for all cases, since every coroutine between a token
        and its reader costs."""
        while (part := self._there(reader)) is None:
            if self._fetching:
                await self._wait()
                continue
            generation = self._generation or self._lead()
            if generation is None:
                continue
            self._fetching = True
            try:
                self._take(await generation.next())
            except StopAsyncIteration:
                self._fail(Unfinished("the source ended without an ending"))
            except Exception as error:  # a replacement may succeed; if none does, every reader gets it
                self._fail(error)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise  # this reader leaves; `next` has lost nothing
                self._fail(Unfinished("the generation was cancelled"))
            finally:
                self._fetching = False
                if self._waiting:
                    self._wake()
        return part

    def _there(self, reader: _SharedReader) -> AnswerPart | None:
        if reader.at < len(self.log):
            reader.at += 1
            return self.log[reader.at - 1]
        if self.over or self.error is not None or reader.refusal is not None:
            raise reader.refusal or self.error or StopAsyncIteration
        if self.begun and not reader.at and not reader.knows_begun:
            reader.knows_begun = True
            return BEGUN
        return None

    async def _wait(self) -> None:
        self._waiting += 1
        try:
            await self._news.wait()
        finally:
            self._waiting -= 1

    def _take(self, part: AnswerPart) -> None:
        if part is BEGUN:
            self.begun = True
            return
        rest = part if self._skipper is None else self._skipper.rest(part)
        if rest is None:
            return
        self.log.append(rest)
        if rest.ending is not None:
            self.over = True
            if self._generation is not None:
                self._generation.close()

    def _fail(self, error: Exception) -> None:
        if self._generation is not None:
            self._generation.close()
            self._generation = None
        if self.error is not None:
            return  # closed meanwhile
        if isinstance(error, LeaderRefused):
            self._refusal = error
            if self._leader is not None:
                self._leader.refusal = error
        else:
            self._failures.append(error)
        if len(self._failures) >= ATTEMPTS or not self._candidates:
            self.error = self._failures[-1] if self._failures else self._refusal
        elif self._failures:
            self._counter.count("flight_replaced")

    def _lead(self) -> Generation | None:
        if not self._candidates:
            self.error = self._failures[-1] if self._failures else self._refusal or Unfinished("no request generates")
            return None
        self._leader = self._candidates.pop(0)
        self._generation = self._leader.generate()
        self._skipper = Skipper(self.log) if self.log else None
        return self._generation

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class SingleFlight:
    def __init__(self, counter: Counter, linger: float = LINGER) -> None:
        self._counter = counter
        self._linger = linger
        self._shared: dict[str, SharedGeneration] = {}

    def __len__(self) -> int:
        return len(self._shared)

    def joinable(self, key: CacheKey) -> bool:
        """Whether this answer is being generated, or has just been."""
        shared = self._shared.get(key.name)
        return shared is not None and shared.joinable

    @asynccontextmanager
    async def join(self, key: CacheKey, generate: Generate) -> AsyncIterator[AsyncIterator[AnswerPart]]:
        """Yields the answer's parts from the first. `generate` is called if no other request generates it, or the one
        that did fails. It must not carry its request's deadline: readers leave when theirs is over."""
        shared = self._shared.get(key.name)
        if shared is None or not shared.joinable:
            shared = self._shared[key.name] = SharedGeneration(self._counter)
            self._counter.count("flight", "lead")
        else:
            self._counter.count("flight", "follow")
        try:
            async with shared.reader(generate) as parts:
                yield parts
        finally:
            self._leave(key, shared)

    def forget_finished(self) -> None:
        """Lets no new reader join: the answer was flushed."""
        self._shared = {name: shared for name, shared in self._shared.items() if shared.busy}

    def close(self) -> None:
        for shared in self._shared.values():
            shared.close()
        self._shared.clear()

    def _leave(self, key: CacheKey, shared: SharedGeneration) -> None:
        if shared.joinable:
            asyncio.get_running_loop().call_later(self._linger, self._drop, key.name, shared)
        else:
            self._drop(key.name, shared)

    def _drop(self, name: str, shared: SharedGeneration) -> None:
        shared.forget_leader()
        if self._shared.get(name) is shared and not shared.busy:
            del self._shared[name]
