"""The front's side of requests: what has come for each and was not read yet. Owns the cap on it, and that nothing is
left behind in the engine once nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Coroutine
from typing import Any

from engine.api import Finish, FinishReason, GenerationRequest, TokenEvents
from engine.client.suspects import Suspects
from engine.errors import Aborted, DeadlineExceeded, EngineError, EngineFailed, OutOfMemory, Quarantined
from engine.ipc.events import Event, Failure
from engine.ipc.frames import Cancel, Command, Pause, Resume, Submit
from engine.ipc.step_mark import MarkedStep

Send = Callable[[Command], None]
_MOST_DEATHS = 3  # of processes that had it, after which a request is kept no more


def _size(event: Event) -> int:
    """Bytes that an unread event is taken to occupy."""
    tops = sum(len(one.top) for one in event.logprobs) if event.logprobs else 0
    return 32 + 12 * (len(event.token_ids) + tops)


class Inbox:
    """What came for one request. `held` is what the reader was given last and is presumably still at."""

    __slots__ = (
        "_cap",
        "_delay",
        "_due",
        "_error",
        "_events",
        "_held",
        "_paused",
        "_queued",
        "_timer",
        "_tokens",
        "_waiter",
        "_want",
        "deaths",
        "key",
        "live",
        "made",
        "request",
        "streams",
    )

    def __init__(self, key: int, request: GenerationRequest, streams: Streams, cap: int) -> None:
        self.key = key
        self.request = request
        self.made = 0  # tokens that came
        self.deaths = 0  # of processes that had it and that it may have to do with
        self.streams = streams
        self.live = True  # the engine has it
        self._cap = cap  # bytes
        self._events: list[Event] = []
        self._error: EngineError | None = None
        self._queued = 0  # bytes
        self._held = 0  # bytes
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._want = 1  # tokens that wake the reader
        self._delay = 0.0  # seconds after which fewer do
        self._tokens = 0  # unread
        self._timer: asyncio.TimerHandle | None = None
        self._due = False  # the delay is over

    def batch(self, tokens: int, delay: float) -> None:
        """See TokenStream.batch."""
        self._want, self._delay = (tokens, delay) if delay > 0 else (1, 0.0)

    def put(self, event: Event) -> None:
        """From the engine."""
        if event.failure is not None:
            self.end(_exception(event.failure))
            return
        self._events.append(event)
        self._queued += _size(event)
        self._tokens += len(event.token_ids)
        self.made += len(event.token_ids)
        if event.finish is not None:
            self.live = False
        elif self._queued + self._held > self._cap and not self._paused:
            self._paused = True
            self.streams.send(Pause(self.key))
        if self._ready:
            self._wake()
        elif self._timer is None:
            self._timer = self.streams.loop.call_later(self._delay, self._overdue)

    def end(self, error: EngineError | None) -> None:
        """Nothing more will come. What came before is read first."""
        self._stop_timer()
        self.live = False
        self._error = error
        self._wake()

    def drop(self, error: EngineError | None) -> None:
        """Nobody will read what came."""
        self._events.clear()
        self.end(error)

    async def next(self) -> TokenEvents:
        """All that is there, as one; waits for something."""
        self._held = 0
        if self._paused and self._queued <= self._cap // 2:
            self._paused = False
            if self.live:
                self.streams.send(Resume(self.key))
        while not (self._events and self._ready):
            if self._error is not None:
                error, self._error = self._error, None
                try:
                    raise error
                finally:
                    del error  # it knows this frame and those of its callers, which would else live until a collection
            if not self.live:
                raise StopAsyncIteration
            await self._wait()
        self._stop_timer()
        events, self._events = self._events, []
        self._held, self._queued, self._tokens = self._queued, 0, 0
        if len(events) == 1:
            return TokenEvents(events[0].token_ids, events[0].logprobs, events[0].finish, events[0].start)
        return TokenEvents(
            tuple(itertools.chain.from_iterable([event.token_ids for event in events])),
            tuple(itertools.chain.from_iterable([event.logprobs for event in events])),
            events[-1].finish,
            events[0].start,
        )

    @property
    def _ready(self) -> bool:
        """Whether what is there is worth waking the reader, who alone can end a pause."""
        return self._tokens >= self._want or self._due or self._paused or not self.live

    def _overdue(self) -> None:
        self._timer = None
        self._due = True
        self._wake()

    def _stop_timer(self) -> None:
        self._due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RuntimeError("a stream has one reader")
        self._waiter = self.streams.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Stream:
    """Implements engine.api.TokenStream. Dropping it unread cancels it too, if only when it is collected."""

    __slots__ = ("_inbox",)

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def __aiter__(self) -> Stream:
        return self

    def __anext__(self) -> Coroutine[Any, Any, TokenEvents]:
        return self._inbox.next()

    def batch(self, tokens: int, delay: float) -> None:
        self._inbox.batch(tokens, delay)

    def cancel(self) -> None:
        self._inbox.streams.cancel(self._inbox, None)

    def abort(self, reason: str) -> None:
        if self._inbox.live:
            self._inbox.streams.cancel(self._inbox, Aborted(reason))

    def __del__(self) -> None:
        inbox = self._inbox
        if inbox.live:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                inbox.streams.loop.call_soon_threadsafe(inbox.streams.cancel, inbox, None)


class Streams:
    """All live requests of one front. Those without a first token outlive the engine process that had them: they are
    kept for the next one, within their deadlines."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Send, cap: int) -> None:
        self.loop = loop
        self.send = send
        self._cap = cap
        self._keys = itertools.count(1)
        self._inboxes: dict[int, Inbox] = {}  # that a process has
        self._kept: dict[int, tuple[Inbox, asyncio.TimerHandle | None]] = {}  # that none has
        self._lost: dict[int, Inbox] = {}  # that the last one had, until it is known how it died
        self._leaving: dict[int, Inbox] = {}  # cancelled since the last step, which may yet be at them
        self._left: dict[int, Inbox] = {}  # and those before it
        self._suspects = Suspects()

    def __len__(self) -> int:
        return len(self._inboxes) + len(self._kept)

    def open(self, request: GenerationRequest) -> Stream:
        """Hands the request to the engine. Raises Quarantined."""
        solo = self._suspects.solo(request)
        inbox = Inbox(next(self._keys), request, self, self._cap)
        self.send(Submit(inbox.key, request, solo))
        self._inboxes[inbox.key] = inbox
        return Stream(inbox)

    def deliver(self, events: list[Event]) -> None:
        """What a step brought. Events for streams that were cancelled meanwhile go nowhere."""
        inboxes = self._inboxes
        if self._leaving or self._left:
            self._left, self._leaving = self._leaving, {}
        for event in events:
            inbox = inboxes.get(event.key)
            if inbox is not None:
                inbox.put(event)
                if not inbox.live:
                    del inboxes[event.key]
                    if event.finish is not None:
                        self._suspects.ended(inbox.request)

    def cancel(self, inbox: Inbox, error: EngineError | None) -> None:
        """Forgets a stream and what it holds, here and in the engine."""
        if self._inboxes.pop(inbox.key, None) is not None:
            self.send(Cancel(inbox.key))
            self._leaving[inbox.key] = inbox
        self._keep_no_more(inbox)
        inbox.drop(error)

    def fail(self, error: Callable[[], EngineError]) -> None:
        """Ends all, each with an exception of its own."""
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.end(error())
        self.give_up(error)

    def lose(self, error: Callable[[], EngineError]) -> None:
        """The process is gone: those that had a token end, the others are kept."""
        inboxes, self._inboxes = self._inboxes, {}
        self._lost = {**self._left, **self._leaving, **inboxes}
        self._left, self._leaving = {}, {}
        for inbox in inboxes.values():
            if inbox.made:
                inbox.end(error())
            else:
                self._keep(inbox)

    def judge(self, step: MarkedStep, ahead: int, error: Callable[[], EngineError]) -> None:
        """It died of itself, and this is what it was at. Steps begin up to `ahead` tokens before those that came."""
        lost, self._lost = self._lost, {}
        named = [lost[key] for key in step.keys if key in lost]
        if step.alone:
            for inbox in named:
                self._suspects.died_alone(inbox.request, inbox.made, ahead)
        else:
            self._suspects.died_together([(inbox.request, inbox.made) for inbox in named], ahead)
        for inbox in named if step.keys else lost.values():  # outside a step anyone may have to do with it
            inbox.deaths += 1
            if inbox.deaths == _MOST_DEATHS and self._keep_no_more(inbox):
                inbox.end(error())

    def acquit(self) -> None:
        """It did not die of anything that it was given."""
        self._lost = {}

    def resume(self) -> None:
        """There is another process: it gets what was kept, in the old order."""
        kept, self._kept = self._kept, {}
        for inbox, timer in kept.values():
            if timer is not None:
                timer.cancel()
            try:
                solo = self._suspects.solo(inbox.request)
            except Quarantined as error:
                inbox.end(error)
                continue
            inbox.key = next(self._keys)  # so that nothing from the old process is taken for its own
            self._inboxes[inbox.key] = inbox
            self.send(Submit(inbox.key, inbox.request, solo))

    def give_up(self, error: Callable[[], EngineError]) -> None:
        """Ends those that are kept."""
        for inbox, _ in list(self._kept.values()):
            self._keep_no_more(inbox)
            inbox.end(error())

    def _keep(self, inbox: Inbox) -> None:
        request = inbox.request
        limits = [limit for limit in (request.deadline, request.expires_at) if limit is not None]
        timer = None
        if limits:
            timer = self.loop.call_later(max(0.0, min(limits) - time.monotonic()), self._expire, inbox)
        self._kept[inbox.key] = inbox, timer

    def _keep_no_more(self, inbox: Inbox) -> bool:
        """Whether it was kept."""
        kept = self._kept.pop(inbox.key, None)
        if kept is not None and kept[1] is not None:
            kept[1].cancel()
        return kept is not None

    def _expire(self, inbox: Inbox) -> None:
        """Its time is up while no engine looks at it: it ends as the engine would end it."""
        self._keep_no_more(inbox)
        request, now = inbox.request, time.monotonic()
        if request.deadline is not None and (request.expires_at is None or request.deadline <= request.expires_at):
            inbox.end(_exception(Failure.DEADLINE))
            return
        waited = now - request.arrived_at
        over = Finish(
            reason=FinishReason.TIME_BUDGET, stop_token_id=None, cached_tokens=0, queue=waited, prefill=0.0, decode=0.0
        )
        inbox.put(Event(inbox.key, finish=over))


def _exception(failure: Failure) -> EngineError:
    match failure:
        case Failure.DEADLINE:
            return DeadlineExceeded("the deadline passed")
        case Failure.STEP:
            return EngineFailed("a step failed")
        case Failure.MEMORY:
            return OutOfMemory("the engine has no memory for this request")
