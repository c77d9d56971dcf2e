"""Buffers one request's unread events, under a cap, and presents them to its reader."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from engine.api import GenerationRequest, TokenEvents
from engine.errors import (
    Aborted,
    ConstraintTooCostly,
    ConstraintUnmet,
    DeadlineExceeded,
    EngineError,
    EngineFailed,
    OutOfMemory,
)
from engine.ipc.events import Event, Failure
from engine.ipc.frames import Command, Pause, Resume

Send = Callable[[Command], None]


class Owner(Protocol):
    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def send(self) -> Send: ...

    @property
    def few(self) -> bool:
        """Whether all streams may be woken at once."""

    def wake(self, inbox: StreamInbox) -> None:
        pass

    def cancel(self, inbox: StreamInbox, error: EngineError | None) -> None:
        """Forgets a stream, here and in the engine."""


_ID = 44  # bytes that an unread id is taken to occupy


def _size_of(event: Event) -> int:
    return 12 * sum(1 + len(one.top) for one in (*event.logprobs, *event.prompt_logprobs))


class StreamInbox:
    """Buffers one request's events. `held` is what the reader got last and presumably still processes."""

    __slots__ = (
        "_called",
        "_cap",
        "_delay",
        "_due",
        "_error",
        "_events",
        "_held",
        "_ids",
        "_paused",
        "_queued",
        "_scored",
        "_scores_come",
        "_timer",
        "_waiter",
        "_want",
        "begun",
        "deaths",
        "key",
        "live",
        "made",
        "owner",
        "request",
    )

    def __init__(self, key: int, request: GenerationRequest, owner: Owner, cap: int) -> None:
        self.key = key
        self.request = request
        self.made = 0  # tokens that came
        self.deaths = 0  # of processes that had it and that it may have to do with
        self.owner = owner
        self.live = True  # the engine has it
        self.begun = False  # something was read of it
        self._cap = cap  # bytes
        self._ids: list[int] = []  # all that are unread
        self._events: list[Event] = []  # that had more to say than one id
        self._error: EngineError | None = None
        self._queued = 0  # bytes
        self._held = 0  # bytes
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._scored = 0  # log-probabilities of the prompt that came
        self._scores_come = 0  # of those, from the process that has it now
        self._want = 1  # tokens that wake the reader
        self._delay = 0.0  # seconds after which fewer do
        self._timer: asyncio.TimerHandle | None = None
        self._due = False  # the delay is over
        self._called = False  # its reader will be woken

    def batch(self, tokens: int, delay: float) -> None:
        self._want, self._delay = (tokens, delay) if delay > 0 else (1, 0.0)

    def put_id(self, token_id: int) -> None:
        self._ids.append(token_id)
        self._queued += _ID
        self.made += 1
        if self._want > 1 or self._queued + self._held > self._cap:
            self._came()
        elif self._waiter is not None:
            self._call()

    def put(self, event: Event) -> None:
        if event.failure is not None:
            self.end(exception_of(event.failure))
            return
        if event.prompt_logprobs:
            event = self._not_seen(event)
        ids = event.token_ids
        self._ids += ids
        self._events.append(event)
        self._queued += 32 + 12 * len(ids) + (_size_of(event) if event.logprobs or event.prompt_logprobs else 0)
        self.made += len(ids)
        if event.finish is not None:
            self.live = False
        self._came()

    def _came(self) -> None:
        if self._queued + self._held > self._cap and not self._paused and self.live:
            self._paused = True
            self.owner.send(Pause(self.key))
        if len(self._ids) >= self._want or self._ready:
            self._call()
        elif self._timer is None:
            self._timer = self.owner.loop.call_later(self._delay, self._overdue)

    def moved(self) -> None:
        self._scores_come = 0

    def _not_seen(self, event: Event) -> Event:
        scores = event.prompt_logprobs[max(0, self._scored - self._scores_come) :]
        self._scores_come += len(event.prompt_logprobs)
        self._scored += len(scores)
        return event._replace(prompt_logprobs=scores)

    def end(self, error: EngineError | None) -> None:
        """Earlier events are read first."""
        self._stop_timer()
        self.live = False
        self._error = error
        self._call()

    def drop(self, error: EngineError | None) -> None:
        self._ids.clear()
        self._events.clear()
        self.end(error)

    async def next(self) -> TokenEvents:
        """Returns all buffered events as one; waits for the first."""
        self._held = 0
        if self._paused and self._queued <= self._cap // 2:
            self._paused = False
            if self.live:
                self.owner.send(Resume(self.key))
        while not ((self._ids or self._events) and (len(self._ids) >= self._want or self._ready)):
            if self._error is not None:
                error, self._error = self._error, None
                try:
                    raise error
                finally:
                    del error  # it knows this frame and those of its callers, which would else live until a collection
            if not self.live:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError("a stream has one reader")
            self._waiter = self.owner.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._due or self._timer is not None:
            self._stop_timer()
        self.begun = True
        ids = tuple(self._ids)
        self._ids.clear()
        self._held, self._queued = self._queued, 0
        if not self._events:
            return TokenEvents(ids)
        events, self._events = self._events, []
        if len(events) == 1:
            (event,) = events
            return TokenEvents(
                ids,
                event.logprobs,
                event.finish,
                event.start,
                event.draft_proposed,
                event.draft_accepted,
                event.prompt_logprobs,
            )
        return TokenEvents(
            ids,
            tuple(itertools.chain.from_iterable([event.logprobs for event in events])),
            events[-1].finish,
            next((event.start for event in events if event.start is not None), None),
            sum([event.draft_proposed for event in events]),
            sum([event.draft_accepted for event in events]),
            tuple(itertools.chain.from_iterable([event.prompt_logprobs for event in events])),
        )

    @property
    def _ready(self) -> bool:
        """Whether to wake the reader. Only the reader can end a pause, so a paused request is ready with any number of
        ids."""
        return self._due or self._paused or not self.live

    def _overdue(self) -> None:
        self._timer = None
        self._due = True
        self._call()

    def _stop_timer(self) -> None:
        self._due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _call(self) -> None:
        waiter = self._waiter
        if waiter is None or self._called:
            return
        if self.owner.few:
            self._waiter = None
            if not waiter.done():  # not cancelled
                waiter.set_result(None)
        else:
            self._called = True
            self.owner.wake(self)

    def wake(self) -> None:
        self._called = False
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # not cancelled
            waiter.set_result(None)


class InboxStream:
    """An unread stream is cancelled when it is collected."""

    __slots__ = ("_inbox",)

    def __init__(self, inbox: StreamInbox) -> None:
        self._inbox = inbox

    def __aiter__(self) -> InboxStream:
        return self

    def __anext__(self) -> Coroutine[Any, Any, TokenEvents]:
        return self._inbox.next()

    def batch(self, tokens: int, delay: float) -> None:
        self._inbox.batch(tokens, delay)

    def cancel(self) -> None:
        self._inbox.owner.cancel(self._inbox, None)

    def abort(self, reason: str) -> None:
        if self._inbox.live:
            self._inbox.owner.cancel(self._inbox, Aborted(reason))

    def __del__(self) -> None:
        inbox = self._inbox
        if inbox.live:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                inbox.owner.loop.call_soon_threadsafe(inbox.owner.cancel, inbox, None)


def exception_of(failure: Failure) -> EngineError:
    match failure:
        case Failure.DEADLINE:
            return DeadlineExceeded("the deadline passed")
        case Failure.STEP:
            return EngineFailed("a step failed")
        case Failure.MEMORY:
            return OutOfMemory("the engine has no memory for this request")
        case Failure.CONSTRAINT:
            return ConstraintUnmet("no token is left that the constraint allows")
        case Failure.CONSTRAINT_COST:
            return ConstraintTooCostly("the constraint takes more time or memory than one may")
