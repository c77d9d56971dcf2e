"""Identical requests at the same time, in this process: one generates, all read.

A flight is an append-only log of messages and the task that fills it. Readers attach at any time and read from the
first message. The task belongs to nobody's request: it goes on while one reader is left, and when it fails, the next
reader's own way of generating takes over where the log ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from cache.answers.resume import resume
from cache.api import BEGUN, LINGER, AnswerPart, CacheKey, Counter, Generate, Refused, Unfinished

ATTEMPTS = 2  # a leader and one replacement
AHEAD = 2048  # messages that a generation may be ahead of its furthest reader


@dataclass(slots=True, eq=False)
class _Seat:
    """A reader, and its own way of generating."""

    generate: Generate
    refusal: Refused | None = None


class Flight:
    """One answer on its way."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._log: list[AnswerPart] = []
        self._waiting: list[_Seat] = []  # of readers who have not led
        self._readers = 0
        self._news = asyncio.Event()
        self._furthest = 0  # messages that some reader has taken
        self._taken = asyncio.Event()
        self._begun = False  # somebody was let in
        self._over = False
        self._error: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def joinable(self) -> bool:
        """Whether a new reader would get an answer."""
        return self._error is None and not (self._task is not None and self._task.cancelling())

    @property
    def busy(self) -> bool:
        """Whether it is on its way."""
        return self._task is not None and not self._task.done()

    async def aclose(self) -> None:
        """Ends it."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    @asynccontextmanager
    async def reader(self, generate: Generate) -> AsyncIterator[AsyncIterator[AnswerPart]]:
        """A seat: while any is taken, the flight goes on."""
        seat = _Seat(generate)
        self._readers += 1
        self._waiting.append(seat)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._fly(), name="flight")
        parts = self._read(seat)
        try:
            yield parts
        finally:
            self._readers -= 1
            if seat in self._waiting:
                self._waiting.remove(seat)
            if self._readers == 0:
                self._task.cancel()

    async def _read(self, seat: _Seat) -> AsyncIterator[AnswerPart]:
        at, told = 0, False
        while True:
            while at < len(self._log):
                yield self._log[at]
                at += 1
                if at > self._furthest:
                    self._furthest = at
                    self._taken.set()
            if (error := seat.refusal or self._error) is not None:
                raise error
            if self._over:
                return
            if self._begun and not at and not told:
                told = True
                yield BEGUN
                continue
            await self._news.wait()

    async def _fly(self) -> None:
        refusal: Refused | None = None
        failures: list[Exception] = []
        try:
            while self._waiting and len(failures) < ATTEMPTS:
                if failures:
                    self._counter.count("flight_replaced")
                seat = self._waiting.pop(0)
                error = await self._lead(seat.generate)
                if error is None:
                    return
                if isinstance(error, Refused):
                    seat.refusal = refusal = error
                    self._wake()
                else:
                    failures.append(error)
            self._error = failures[-1] if failures else refusal
        except asyncio.CancelledError:
            self._error = Unfinished("the flight was ended")
            raise
        finally:
            self._over = True
            self._wake()

    async def _lead(self, generate: Generate) -> Exception | None:
        """Appends to the log until the answer ends. The error, if it ends badly, for others to take over."""
        try:
            async with aclosing(generate()) as source, aclosing(resume(tuple(self._log), source)) as rest:
                async for part in rest:
                    if part is BEGUN:
                        self._begun = True
                        self._wake()
                        continue
                    self._log.append(part)
                    self._wake()
                    await self._keep_pace()
        except Exception as error:  # a replacement may succeed; if none does, every reader gets it
            return error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return Unfinished("the generation was cancelled")
        return None

    async def _keep_pace(self) -> None:
        """Waits while all readers are far behind."""
        while len(self._log) - self._furthest >= AHEAD:
            self._taken.clear()
            await self._taken.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Flights:
    """All flights of this process, by the name of the answer."""

    def __init__(self, counter: Counter, linger: float = LINGER) -> None:
        self._counter = counter
        self._linger = linger
        self._flights: dict[str, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def flying(self, key: CacheKey) -> bool:
        """Whether there is one to read along with."""
        flight = self._flights.get(key.name)
        return flight is not None and flight.joinable

    @asynccontextmanager
    async def join(self, key: CacheKey, generate: Generate) -> AsyncIterator[AsyncIterator[AnswerPart]]:
        """The answer's messages from the first. `generate` is called if nobody else does it, or the one who did fails.

        It must not carry a deadline of its own request: readers leave when theirs is over.
        """
        flight = self._flights.get(key.name)
        if flight is None or not flight.joinable:
            flight = self._flights[key.name] = Flight(self._counter)
            self._counter.count("flight", "lead")
        else:
            self._counter.count("flight", "follow")
        try:
            async with flight.reader(generate) as parts:
                yield parts
        finally:
            self._leave(key, flight)

    def forget_finished(self) -> None:
        """No new reader joins a flight that is over: its answer was flushed."""
        self._flights = {name: flight for name, flight in self._flights.items() if flight.busy}

    async def aclose(self) -> None:
        """Ends all."""
        flights = list(self._flights.values())
        self._flights.clear()
        for flight in flights:
            await flight.aclose()

    def _leave(self, key: CacheKey, flight: Flight) -> None:
        if flight.joinable:
            asyncio.get_running_loop().call_later(self._linger, self._drop, key.name, flight)
        else:
            self._drop(key.name, flight)

    def _drop(self, name: str, flight: Flight) -> None:
        if self._flights.get(name) is flight and not (flight.busy and flight.joinable):
            del self._flights[name]
