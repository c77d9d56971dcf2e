"""Tracks all requests of a front across engine processes, and cancels those without a reader."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence

from engine.api import Finish, FinishReason, GenerationRequest, Priority
from engine.client.crash_tracker import CrashTracker
from engine.client.inbox import InboxStream, Send, StreamInbox, exception_of
from engine.errors import EngineError, Quarantined
from engine.ipc.events import Event, Failure
from engine.ipc.frames import Cancel, Submit
from engine.ipc.step_mark import MarkedStep

_MOST_DEATHS = 3  # of processes that had it, after which a request is kept no more
_FEW = 64  # streams, up to which all readers are woken at once: their messages are three milliseconds of a core
_WOKEN_A_TURN = 8  # readers, where there are more streams
_TURNS = 4  # from a turn that wakes readers to the next: gRPC hands over a call in three or four
_MOST_LEAVING = 1024  # cancelled requests that a step may yet be at: as many as there are slots


class Streams:
    """All live requests of one front. Those without a first token outlive their engine process, within their
    deadlines."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Send, cap: int) -> None:
        self.loop = loop
        self.send = send
        self._cap = cap
        self._keys = itertools.count(1)
        self._inboxes: dict[int, StreamInbox] = {}  # that a process has
        self._kept: dict[int, tuple[StreamInbox, asyncio.TimerHandle | None]] = {}  # that none has
        self._lost: dict[int, StreamInbox] = {}  # that the last one had, until it is known how it died
        self._leaving: dict[int, StreamInbox] = {}  # cancelled since the last step, which may yet be at them
        self._left: dict[int, StreamInbox] = {}  # and those before it
        self._crashes = CrashTracker()
        self.few = True  # streams, when a step came last
        self._turn = 0  # of the event loop, modulo _TURNS; readers are woken in turn 0
        self._turning = False  # another turn will come
        self._woken = 0  # readers, in this turn
        self._to_wake = deque[StreamInbox]()  # in later ones
        self._to_wake_first = deque[StreamInbox]()  # before those: nothing was read of them yet, or interactive

    def __len__(self) -> int:
        return len(self._inboxes) + len(self._kept)

    @property
    def quarantines(self) -> int:
        return self._crashes.quarantines

    def open(self, request: GenerationRequest) -> InboxStream:
        """Raises Quarantined for a request that crashed the engine."""
        solo = self._crashes.solo(request)
        inbox = StreamInbox(next(self._keys), request, self, self._cap // request.siblings)
        self.send(Submit(inbox.key, request, solo))
        self._inboxes[inbox.key] = inbox
        return InboxStream(inbox)

    def deliver(self, events: list[Event], keys: Sequence[int] = (), ids: Sequence[int] = ()) -> None:
        """Delivers a step's ids by key, then its events. Drops those of cancelled streams."""
        inboxes = self._inboxes
        self.few = len(inboxes) <= _FEW
        if self._leaving or self._left:
            self._left, self._leaving = self._leaving, {}
        for key, token_id in zip(keys, ids, strict=True):
            inbox = inboxes.get(key)
            if inbox is not None:
                inbox.put_id(token_id)
        for event in events:
            inbox = inboxes.get(event.key)
            if inbox is not None:
                inbox.put(event)
                if not inbox.live:
                    del inboxes[event.key]
                    if event.finish is not None:
                        self._crashes.ended(inbox.request)

    def wake(self, inbox: StreamInbox) -> None:
        """Wakes a reader soon. Of many, a few are woken in every fourth turn of the event loop, since each writes a
        message, and new calls must not wait for all of them. Readers without a token yet and interactive ones do not
        wait. Of few, none waits: turns cost a message a tenth of its time."""
        if self.few:
            inbox.wake()
            return
        first = not inbox.begun or inbox.request.priority == Priority.INTERACTIVE
        if self._woken == _WOKEN_A_TURN or (self._turn and not first):
            (self._to_wake_first if first else self._to_wake).append(inbox)
        else:
            self._woken += 1
            inbox.wake()
        if not self._turning:
            self._turning = True
            self.loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn, self._woken = (self._turn + 1) % _TURNS, 0
        for waiting in (self._to_wake_first,) if self._turn else (self._to_wake_first, self._to_wake):
            while waiting and self._woken < _WOKEN_A_TURN:
                self._woken += 1
                waiting.popleft().wake()
        self._turning = bool(self._turn or self._woken)
        if self._turning:
            self.loop.call_soon(self._next_turn)

    def cancel(self, inbox: StreamInbox, error: EngineError | None) -> None:
        if self._inboxes.pop(inbox.key, None) is not None:
            self.send(Cancel(inbox.key))
            if len(self._leaving) < _MOST_LEAVING:  # while an engine hangs there may be any number
                self._leaving[inbox.key] = inbox
        self._keep_no_more(inbox)
        inbox.drop(error)

    def fail(self, error: Callable[[], EngineError]) -> None:
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.end(error())
        self.give_up(error)

    def lose(self, error: Callable[[], EngineError]) -> None:
        """Ends streams that had a token, and keeps the others for the next process."""
        inboxes, self._inboxes = self._inboxes, {}
        self._lost = {**self._left, **self._leaving, **inboxes}
        self._left, self._leaving = {}, {}
        for inbox in inboxes.values():
            if inbox.made:
                inbox.end(error())
            else:
                self._keep(inbox)

    def attribute_crash(self, step: MarkedStep, ahead: int, error: Callable[[], EngineError]) -> None:
        """Attributes the process's own crash to its unfinished step, which began up to `ahead` tokens before those that
        arrived."""
        lost, self._lost = self._lost, {}
        named = [lost[key] for key in step.keys if key in lost]
        if step.alone:
            for inbox in named:
                self._crashes.died_alone(inbox.request, inbox.made, ahead)
        else:
            self._crashes.died_together([(inbox.request, inbox.made) for inbox in named], ahead)
        for inbox in named if step.keys else lost.values():  # outside a step anyone may have to do with it
            inbox.deaths += 1
            if inbox.deaths == _MOST_DEATHS and self._keep_no_more(inbox):
                inbox.end(error())

    def clear_crash(self) -> None:
        self._lost = {}

    def resume(self) -> None:
        """Submits kept requests to the new process, in the old order."""
        kept, self._kept = self._kept, {}
        for inbox, timer in kept.values():
            if timer is not None:
                timer.cancel()
            try:
                solo = self._crashes.solo(inbox.request)
            except Quarantined as error:
                inbox.end(error)
                continue
            inbox.moved()
            inbox.key = next(self._keys)  # so that nothing from the old process is taken for its own
            self._inboxes[inbox.key] = inbox
            self.send(Submit(inbox.key, inbox.request, solo))

    def give_up(self, error: Callable[[], EngineError]) -> None:
        for inbox, _ in list(self._kept.values()):
            self._keep_no_more(inbox)
            inbox.end(error())

    def _keep(self, inbox: StreamInbox) -> None:
        request = inbox.request
        limits = [limit for limit in (request.deadline, request.expires_at) if limit is not None]
        timer = None
        if limits:
            timer = self.loop.call_later(max(0.0, min(limits) - time.monotonic()), self._expire, inbox)
        self._kept[inbox.key] = inbox, timer

    def _keep_no_more(self, inbox: StreamInbox) -> bool:
        kept = self._kept.pop(inbox.key, None)
        if kept is not None and kept[1] is not None:
            kept[1].cancel()
        return kept is not None

    def _expire(self, inbox: StreamInbox) -> None:
        self._keep_no_more(inbox)
        request, now = inbox.request, time.monotonic()
        if request.deadline is not None and (request.expires_at is None or request.deadline <= request.expires_at):
            inbox.end(exception_of(Failure.DEADLINE))
            return
        waited = now - request.arrived_at
        over = Finish(
            reason=FinishReason.TIME_BUDGET, stop_token_id=None, cached_tokens=0, queue=waited, prefill=0.0, decode=0.0
        )
        inbox.put(Event(inbox.key, finish=over))
