"""Bounds incoming messages: no message is read before its caller is known, and what is read is bounded in bytes.

Beyond a first window of 64 KiB, a message of unknown size arrives only while a read is posted. So a read reserves the
largest message, and readers may reserve half of `live_bytes`; the other half is for messages being answered. Senders
take turns. A read that has lasted `_PATIENCE` loses its turn where another call waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import TracebackType

from service.core.errors import InvalidRequest, MessageStalled, Overloaded, Reason, Violation
from service.transport.call.busy import BusyPeers
from service.transport.call.context import Context

_PATIENCE = 1.0  # seconds that a read may take while others wait
_LONGEST_READ = 30.0  # seconds, where no call waits
_LONGEST_WAIT = 10.0  # seconds for a turn
_LONGEST_DRAIN = 1.0  # seconds that a refused call is drained while its caller may be writing
_PAUSE = 0.25  # seconds without a message after which the caller counts as not writing
_DRAINS = 4, 256  # readers for each call that drains at a time; most calls that drain or wait to drain
_MOST_WAITING = 1024  # calls; each may hold a first window
_LARGE = 65_536  # bytes of a message that takes milliseconds to parse
_RETRY = 1.0  # seconds

Sender = Hashable


@dataclass(frozen=True, slots=True)
class InboxBounds:
    message_bytes: int  # the largest message
    live_bytes: int  # all that are being read or answered

    @property
    def readers(self) -> int:
        return max(2, self.live_bytes // 2 // self.message_bytes)


SMALL = InboxBounds(message_bytes=64 * 1024, live_bytes=8 * 1024 * 1024)  # for a port without prompts


class Incoming:
    """A call's messages. Leaving the `with` block releases what it held."""

    __slots__ = ("_context", "_inbox", "busy", "came", "held", "peer", "sender", "since", "turn")

    def __init__(self, inbox: Inbox, context: Context, tenant: str) -> None:
        self._inbox = inbox
        self._context = context
        self.peer = context.peer()
        self.sender: Sender = (self.peer, tenant)
        self.busy = False  # whether its message was read and its connection counted as busy
        self.held = 0  # bytes of the message, once it is read
        self.since = 0.0  # when it began to read; seconds, the loop's clock
        self.turn: asyncio.Future[bool] | None = None  # whether it may read, once that is known
        self.came: asyncio.Future[object] | None = None  # what the read ended with, while it reads

    def __enter__(self) -> Incoming:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inbox.forget(self)

    async def read(self) -> bytes:
        """Raises Overloaded, MessageStalled, or InvalidRequest where the caller ended without a message."""
        data = await self.next()
        if data is None:
            raise InvalidRequest((Violation("", "no message came"),))
        return data

    async def next(self) -> bytes | None:
        """None where the caller has sent its last message. Raises Overloaded or MessageStalled."""
        inbox, loop = self._inbox, asyncio.get_running_loop()
        came = inbox.begin(self, loop) or await inbox.turn(self, loop)
        try:
            if not came.done():
                loop.create_task(self._read_into(came))
            found = await came
        finally:
            self.came = None
            inbox.read_ended(self, loop)
        if isinstance(found, Exception):
            raise found
        if not isinstance(found, bytes):  # grpc.aio.EOF
            return None
        inbox.hold(self, len(found))
        if len(found) > _LARGE:
            await inbox.breathe()
        return found

    async def _read_into(self, came: asyncio.Future[object]) -> None:
        """Runs gRPC's read, which is never cancelled: it would not release a message that arrives nonetheless. A future
        beside a task costs a tenth of a shield within a timeout."""
        try:
            found: object = await self._context.read()
        except Exception as error:
            found = error
        if not came.done():
            came.set_result(found)

    def answer(self, granted: bool) -> None:
        if self.turn is not None and not self.turn.done():
            self.turn.set_result(granted)

    def interrupt(self, error: Callable[[], Exception]) -> None:
        """Ends the read, which raises the error."""
        if self.came is not None and not self.came.done():
            self.came.set_result(error())


class Inbox:
    """The calls of one port that wait to read, read, or hold what they have read."""

    def __init__(self, bounds: InboxBounds, refusals: Counter[str]) -> None:
        self._bounds = bounds
        self._readers = bounds.readers
        self._share = max(1, self._readers // 2)  # of them, for one sender
        self.busy = BusyPeers()
        self._drains = asyncio.Semaphore(max(1, self._readers // _DRAINS[0]))
        self._reads: set[asyncio.Task[None]] = set()  # of drained calls; each lasts until a message or the call's end
        self._draining = 0  # calls that drain or wait to drain
        self._refusals = refusals  # counted by reason
        self._reading: dict[Incoming, None] = {}  # longest first
        self._reading_of: dict[Sender, dict[Incoming, None]] = {}
        self._waiting: dict[Sender, dict[Incoming, None]] = {}  # whose turn it is first
        self._waiting_count = 0
        self._held = 0  # bytes
        self._large = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None  # while anybody waits
        self._limit: asyncio.TimerHandle | None = None  # while anybody reads, and for a while after

    def open(self, context: Context, tenant: str) -> Incoming:
        """One connection of one tenant is one sender."""
        return Incoming(self, context, tenant)

    def begin(self, one: Incoming, loop: asyncio.AbstractEventLoop) -> asyncio.Future[object] | None:
        """Returns the future of the message, if the call may read at once."""
        if one.sender in self._waiting or not self._has_room(one.sender):
            return None
        return self._begin(one, loop)

    async def turn(self, one: Incoming, loop: asyncio.AbstractEventLoop) -> asyncio.Future[object]:
        """Waits for a turn and returns the future of the message. Raises Overloaded."""
        one.turn = loop.create_future()
        self._enqueue(one)
        self._watch(loop)
        try:
            async with asyncio.timeout(_LONGEST_WAIT):
                granted = await one.turn
        except BaseException as error:
            self._dequeue(one)
            self.read_ended(one, loop)  # where its turn came at the same moment
            if not isinstance(error, TimeoutError):
                raise
            granted = False
        if not granted or one.came is None:
            raise self.overloaded("too many messages wait to be read", Reason.MESSAGES)
        return one.came

    def read_ended(self, one: Incoming, loop: asyncio.AbstractEventLoop) -> None:
        if one in self._reading:
            self._end(one)
            if self._waiting:
                self._give_turns(loop)

    def hold(self, one: Incoming, size: int) -> None:
        """Accounts `size` bytes to the call until it is forgotten. Raises Overloaded."""
        if self._held + size > self._bounds.live_bytes // 2:
            raise self.overloaded("the messages of live requests are too large together", Reason.MESSAGES)
        self._held += size
        one.held = size
        self.occupy(one)

    def occupy(self, one: Incoming) -> None:
        """Protects the call's connection from eviction until the call is forgotten."""
        if not one.busy:
            one.busy = True
            self.busy.begin(one.peer)

    async def breathe(self) -> None:
        """Returns to one call at a time, after all other tasks of the loop: what follows takes a while."""
        async with self._large:
            await asyncio.sleep(0)

    def forget(self, one: Incoming) -> None:
        self._held -= one.held
        one.held = 0
        if one.busy:
            one.busy = False
            self.busy.end(one.peer)

    async def drain(self, context: Context) -> None:
        """Discards what a refused call still sends, since a grpc.aio client that is writing when its call ends reports
        INTERNAL instead of the status. Ends when the caller half-closes or pauses, or at a bound."""
        if self._draining >= _DRAINS[1]:
            return
        self._draining += 1
        try:
            async with asyncio.timeout(_LONGEST_DRAIN), self._drains:
                left = self._bounds.message_bytes
                while left >= 0 and isinstance(data := await self._before_pause(context), bytes):
                    left -= len(data)
        except TimeoutError:
            pass
        finally:
            self._draining -= 1

    async def _before_pause(self, context: Context) -> object:
        """Returns grpc.aio.EOF where the caller has half-closed, and None where the call has ended or nothing comes
        within _PAUSE."""
        loop = asyncio.get_running_loop()
        came: asyncio.Future[object] = loop.create_future()

        async def read() -> None:  # never cancelled, for the reason in Incoming._read_into
            with contextlib.suppress(Exception):
                found = await context.read()
                if not came.done():
                    came.set_result(found)
            if not came.done():
                came.set_result(None)

        task = loop.create_task(read())
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)
        try:
            async with asyncio.timeout(_PAUSE):
                return await came
        except TimeoutError:
            return None

    def overloaded(self, message: str, reason: Reason) -> Overloaded:
        self._refusals[reason] += 1
        return Overloaded(message, reason, _RETRY * random.uniform(1.0, 1.5))

    def _has_room(self, sender: Sender) -> bool:
        return len(self._reading) < self._readers and len(self._reading_of.get(sender, ())) < self._share

    def _begin(self, one: Incoming, loop: asyncio.AbstractEventLoop) -> asyncio.Future[object]:
        one.since = loop.time()
        one.came = came = loop.create_future()
        self._reading[one] = None
        self._reading_of.setdefault(one.sender, {})[one] = None
        if self._limit is None:
            self._limit = loop.call_later(_LONGEST_READ, self._interrupt_stalled, loop)
        return came

    def _end(self, one: Incoming) -> None:
        del self._reading[one]
        mine = self._reading_of[one.sender]
        del mine[one]
        if not mine:
            del self._reading_of[one.sender]

    def _enqueue(self, one: Incoming) -> None:
        """Where too many calls wait, the sender with most of them loses its newest."""
        self._waiting.setdefault(one.sender, {})[one] = None
        self._waiting_count += 1
        if self._waiting_count > _MOST_WAITING:
            crowd = max(self._waiting, key=lambda sender: len(self._waiting[sender]))
            newest = next(reversed(self._waiting[crowd]))
            self._dequeue(newest)
            newest.answer(False)

    def _dequeue(self, one: Incoming) -> None:
        mine = self._waiting.get(one.sender, {})
        if one in mine:
            del mine[one]
            self._waiting_count -= 1
            if not mine:
                del self._waiting[one.sender]

    def _give_turns(self, loop: asyncio.AbstractEventLoop) -> None:
        given = True
        while given and len(self._reading) < self._readers:
            given = False
            for sender in tuple(self._waiting):
                if self._has_room(sender):
                    mine = self._waiting.pop(sender)
                    self._waiting[sender] = mine  # behind the others
                    one = next(iter(mine))
                    self._dequeue(one)
                    self._begin(one, loop)
                    one.answer(True)
                    given = True

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None and self._waiting_count:
            self._timer = loop.call_later(_PATIENCE / 4, self._interrupt_slow, loop)

    def _interrupt_slow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Interrupts no more reads than calls wait."""
        self._timer = None
        before = loop.time() - _PATIENCE
        for sender, mine in tuple(self._waiting.items()):
            full = len(self._reading) >= self._readers
            candidates = self._reading if full else self._reading_of.get(sender, {})
            for slow, _ in zip(tuple(candidates), tuple(mine), strict=False):
                if slow.since > before:
                    break
                self._end(slow)
                slow.interrupt(self._too_slow)
        self._give_turns(loop)
        self._watch(loop)

    def _interrupt_stalled(self, loop: asyncio.AbstractEventLoop) -> None:
        """All reads share one timer: one for each would cost more than the read."""
        before = loop.time() - _LONGEST_READ
        for one in tuple(self._reading):
            if one.since > before:
                break
            self._end(one)
            one.interrupt(lambda: MessageStalled("the message did not come"))
        self._give_turns(loop)
        oldest = next(iter(self._reading), None)
        due = None if oldest is None else oldest.since + _LONGEST_READ
        self._limit = None if due is None else loop.call_at(due, self._interrupt_stalled, loop)

    def _too_slow(self) -> Exception:
        return self.overloaded("the message came too slowly while others waited", Reason.MESSAGES)
