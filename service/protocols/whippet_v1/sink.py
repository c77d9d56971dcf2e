"""Cuts an answer into messages and hands them to gRPC: how many tokens a message holds, how long one may wait, and what
happens when the reader takes none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import grpc

from engine.api import TokenLogprob
from service.core.errors import StreamStalled
from service.core.request import Ask, Delivery, Ending, PromptFacts
from service.pb.whippet.v1 import generation_pb2 as pb
from service.protocols.whippet_v1 import render as answers

Context = grpc.aio.ServicerContext[bytes, bytes]
_UNBOUNDED = 1 << 62  # tokens
_EACH_TOKEN = Delivery(1, 0.0)
_WHOLE = Delivery(1024, 0.1)
_WHOLE_WITH_STOPS = Delivery(16, 0.02)  # what is generated beyond a match is for nothing


class Sink(Protocol):
    """Takes an answer piece by piece."""

    @property
    def batch(self) -> Delivery:
        """How many tokens, or how old a first one, it takes to wake the reader of the engine's stream."""

    @property
    def room(self) -> int:
        """Tokens that may be added before the next flush."""

    async def begin(self, facts: PromptFacts) -> None:
        """The request was let in."""

    def add(self, text: str, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> bool:
        """Takes a piece. True where it is time to flush."""

    async def flush(self) -> None:
        """Sends what there is, if that is anything."""

    async def end(self, ending: Ending) -> None:
        """The answer is whole."""

    def close(self) -> None:
        """Nothing is sent from now on."""


async def _send_metadata(context: Context, facts: PromptFacts) -> None:
    await context.send_initial_metadata((("x-request-id", facts.request_id), ("x-cache", facts.cache)))


class Whole:
    """The one message of a unary answer."""

    def __init__(self, context: Context, ask: Ask, response: pb.GenerateResponse) -> None:
        self.batch = _WHOLE_WITH_STOPS if ask.stops.strings else _WHOLE
        self._context = context
        self._output = ask.output
        self._response = response
        self._text: list[str] = []

    @property
    def room(self) -> int:
        """No message is cut."""
        return _UNBOUNDED

    async def begin(self, facts: PromptFacts) -> None:
        """Tells the caller, who waits for the rest."""
        self._response.prompt_info.CopyFrom(answers.prompt_info(facts))
        await _send_metadata(self._context, facts)

    def add(self, text: str, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> bool:
        """Keeps it."""
        self._text.append(text)
        if self._output.token_ids:
            self._response.token_ids.extend(ids)
        if logprobs:
            self._response.logprobs.extend(answers.logprobs(ids, logprobs))
        return False

    async def flush(self) -> None:
        """Nothing is sent before the end."""

    async def end(self, ending: Ending) -> None:
        """The response is complete."""
        self._response.text = "".join(self._text)
        self._response.finish.CopyFrom(answers.finish(ending))

    def close(self) -> None:
        """Nothing is under way."""


class Messages:
    """The messages of a streamed answer."""

    def __init__(self, writer: Writer, ask: Ask, chunked: bool = False) -> None:
        # An answer that a stop string may end is read token by token, and waits here for its message to fill; so does
        # one whose source does not batch.
        self.batch = _EACH_TOKEN if ask.stops.strings else ask.delivery
        self._writer = writer
        self._limit = ask.delivery.max_tokens
        self._delay = ask.delivery.max_delay if ask.stops.strings or chunked else 0.0
        self._want_ids = ask.output.token_ids
        self._facts: PromptFacts | None = None  # until the first message took it
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[pb.TokenLogprobs] = []
        self._count = 0  # tokens since the last message
        self._timer: asyncio.TimerHandle | None = None
        self._late: asyncio.Task[None] | None = None  # sends what waited max_delay

    @property
    def room(self) -> int:
        """Up to the caller's limit."""
        return self._limit - self._count

    async def begin(self, facts: PromptFacts) -> None:
        """Sends the headers; what was asked travels with the first tokens."""
        self._facts = facts
        await _send_metadata(self._writer.context, facts)

    def add(self, text: str, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> bool:
        """Keeps it until the message is full or old enough."""
        if text:
            self._text = self._text + text if self._text else text
        if self._want_ids:
            self._ids.extend(ids)
        if logprobs:
            self._logprobs.extend(answers.logprobs(ids, logprobs))
        self._count += len(ids)
        if self._count >= self._limit or not self._delay:
            return True
        if self._timer is None:
            self._start_timer()
        return False

    async def flush(self) -> None:
        """Waits for a late message first, since gRPC sends one at a time."""
        self._stop_timer()
        if self._late is not None:
            await self._late
            self._late = None
        await self._send()

    async def end(self, ending: Ending) -> None:
        """The last message: what is left, and the finish."""
        self._stop_timer()
        if self._late is not None:
            await self._late
        message = self._take()
        message.finish.CopyFrom(answers.finish(ending))
        await self._writer.write(message.SerializeToString())

    def close(self) -> None:
        """Nothing is sent from now on."""
        self._stop_timer()
        if self._late is not None and not self._late.cancel() and not self._late.cancelled():
            self._late.exception()  # the reader went away while it was sent; nobody else needs to know

    async def _send(self) -> None:
        if self._text or self._ids or self._logprobs:
            await self._writer.write(self._take().SerializeToString())
        else:
            self._count = 0

    def _take(self) -> pb.GenerateStreamResponse:
        message = pb.GenerateStreamResponse(text=self._text)
        self._text = ""
        self._count = 0
        if self._ids:
            message.token_ids.extend(self._ids)
            self._ids.clear()
        if self._logprobs:
            message.logprobs.extend(self._logprobs)
            self._logprobs.clear()
        if self._facts is not None:
            message.prompt_info.CopyFrom(answers.prompt_info(self._facts))
            self._facts = None
        return message

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._late is None or self._late.done():
            self._late = asyncio.get_running_loop().create_task(self._send())
        else:
            self._start_timer()


class Writer:
    """Writes to one RPC, and knows since when a write has been waiting."""

    def __init__(self, context: Context, watch: StallWatch) -> None:
        self.context = context
        self.waiting_since: float | None = None
        self.stalled = False
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()

    def __enter__(self) -> Writer:
        self._watch.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._watch.remove(self)
        if self.stalled and kind is asyncio.CancelledError and self._task is not None:
            self._task.uncancel()
            raise StreamStalled("the reader took no message for too long")

    async def write(self, data: bytes) -> None:
        """Returns when gRPC has taken it."""
        self.waiting_since = self._loop.time()
        await self.context.write(data)
        self.waiting_since = None

    def stall(self) -> None:
        """Interrupts the handler, which turns it into StreamStalled."""
        self.stalled = True
        if self._task is not None:
            self._task.cancel()


class StallWatch:
    """Ends the streams whose reader takes nothing. One look at all of them costs less than a timer for each write."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout  # seconds
        self._writers: set[Writer] = set()

    def add(self, writer: Writer) -> None:
        """Looks after it."""
        self._writers.add(writer)

    def remove(self, writer: Writer) -> None:
        """It has ended."""
        self._writers.discard(writer)

    async def run(self) -> None:
        """For ever. A stream is ended at most a tenth of the timeout late."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self._timeout / 10))
            before = loop.time() - self._timeout
            for writer in self._writers:
                since = writer.waiting_since
                if since is not None and since < before and not writer.stalled:
                    writer.stall()
