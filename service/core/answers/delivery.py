"""Cuts an answer into messages and sends one at a time to the protocol's `Outlet`, which knows the wire's form.

A message costs a front several times what a token does. So with few streams a caller gets each token at once; with
many, a token waits for others of its stream, and a message holds all that has arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from engine.api import TokenLogprob
from service.core.parsing.answer import CallDelta
from service.core.request import Delivery, Ending, PromptFacts, Request

_UNBOUNDED = 1 << 62  # tokens
MANY = 16  # live requests, up to which a message a token takes a small part of any engine's step
MOST = 1024  # tokens in a message that has no certain size
_A_STREAM = 0.0001  # seconds: what a token waits for others of its stream, for each stream that runs
_LONGEST = 0.05  # seconds of that
_STORMED = 4  # times as long, and at most, while a front has refusals to send beside the messages
_MOST_SCORES = 4096  # tokens of the prompt in a message, and candidates for their places
_WHOLE = Delivery(1024, 0.1)
_WHOLE_WITH_STOPS = Delivery(16, 0.02)  # what is generated beyond a match is for nothing


def coalescing_delay(streams: int, most: float, stormed: bool) -> float:
    """Seconds that a token waits for others of its stream, so that all streams send at most ten thousand messages a
    second, or a quarter of that while `stormed`."""
    if streams <= MANY:
        return 0.0
    return min(most, min(_LONGEST, _A_STREAM * streams) * (_STORMED if stormed else 1))


class AnswerMessage(msgspec.Struct):
    """Has ids if they or their log-probabilities are to be sent. A named tuple would take twice as long to make."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]  # one an id, or none
    prompt: PromptFacts | None  # in the first message
    ending: Ending | None  # in the last one
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
    # The next ones of the prompt, from the second on, if their log-probabilities are sent.
    prompt_ids: Sequence[int] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()  # one for each
    number: int = 0  # of several answers, which


class Outlet(Protocol):
    async def begin(self, prompt: PromptFacts) -> None:
        """Called once, before the first message: headers leave, and no other server can be asked any more."""

    def send(self, message: AnswerMessage) -> Awaitable[None]:
        """Returns once the transport has taken the message, so that a slow reader slows the answer. Called one at a
        time."""


class Sink(Protocol):
    @property
    def batch(self) -> Delivery:
        """Tokens, or age of the first, that wake the reader of the engine's stream."""

    @property
    def limit(self) -> int:
        """Most tokens of a message. Larger parts have cuts."""

    @property
    def room(self) -> int:
        """Tokens that may be added before the next flush."""

    async def begin(self, prompt: PromptFacts) -> None:
        pass

    async def score(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Takes log-probabilities of the prompt, before any piece."""

    def add(self, text: str, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> bool:
        """Returns whether it is time to flush."""

    def flush(self) -> Awaitable[None]:
        pass

    async def end(self, ending: Ending) -> None:
        """Sends what is left, and the ending."""

    def close(self) -> None:
        pass


class Whole:
    """Sends a unary answer, headers with it, since until then another server could be asked."""

    def __init__(self, outlet: Outlet, request: Request) -> None:
        self.batch = _WHOLE_WITH_STOPS if request.stops.strings else _WHOLE
        self.limit = self.room = _UNBOUNDED
        self._outlet = outlet
        self._keep_ids = _sends_ids(request)
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt: PromptFacts | None = None
        self._prompt_ids: list[int] = []
        self._prompt_logprobs: list[TokenLogprob] = []

    async def begin(self, prompt: PromptFacts) -> None:
        self._prompt = prompt

    async def score(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        self._prompt_ids.extend(ids)
        self._prompt_logprobs.extend(logprobs)

    def add(self, text: str, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> bool:
        self._text.append(text)
        if self._keep_ids:
            self._ids.extend(ids)
            self._logprobs.extend(logprobs)
        return False

    async def flush(self) -> None:
        pass

    async def end(self, ending: Ending) -> None:
        assert self._prompt is not None
        text = "".join(self._text)
        await self._outlet.begin(self._prompt)
        await self._outlet.send(
            AnswerMessage(
                text,
                self._ids,
                self._logprobs,
                self._prompt,
                ending,
                prompt_ids=self._prompt_ids,
                prompt_logprobs=self._prompt_logprobs,
            )
        )

    def close(self) -> None:
        pass


class Messages:
    def __init__(self, outlet: Outlet, request: Request, gather: bool, live: Callable[[], int]) -> None:
        """`gather`: the source does not batch tokens, so messages fill here."""
        # An answer that a stop string may end is read token by token, and waits here too.
        stops = request.stops.strings
        self.batch = Delivery(1, 0.0, request.delivery.coalescing_delay) if stops else request.delivery
        self._outlet = outlet
        self.limit = request.delivery.max_tokens
        self._sized = request.delivery.coalescing_delay is None
        self._live = live
        self._delay = request.delivery.max_delay if stops or gather else 0.0
        self._keep_ids = _sends_ids(request)
        self._candidates = request.output.prompt_logprobs or 0
        self._prompt: PromptFacts | None = None  # until the first message has taken it
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._count = 0  # tokens since the last message
        self._timer: asyncio.TimerHandle | None = None
        self._late: asyncio.Task[None] | None = None  # sends what waited max_delay

    @property
    def room(self) -> int:
        most = self.limit if self._sized or self._live() <= MANY else MOST
        return most - self._count

    async def begin(self, prompt: PromptFacts) -> None:
        self._prompt = prompt
        await self._outlet.begin(prompt)

    async def score(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        most = max(1, _MOST_SCORES // (1 + self._candidates))
        for first in range(0, len(ids), most):
            prompt, self._prompt = self._prompt, None
            some, values = ids[first : first + most], logprobs[first : first + most]
            await self._outlet.send(AnswerMessage("", (), (), prompt, None, prompt_ids=some, prompt_logprobs=values))

    def add(self, text: str, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> bool:
        if text:
            self._text = self._text + text if self._text else text
        if self._keep_ids:
            self._ids.extend(ids)
            self._logprobs.extend(logprobs)
        self._count += len(ids)
        if self._count >= self.limit or not self._delay:
            return True
        if self._timer is None:
            self._start_timer()
        return False

    def flush(self) -> Awaitable[None]:
        if self._timer is not None:
            self._stop_timer()
        if self._late is None and (self._text or self._ids):
            return self._outlet.send(self._take(None))
        return self._flush()

    async def _flush(self) -> None:
        """Waits for a late message first, since the outlet takes one at a time."""
        if self._late is not None:
            await self._late
            self._late = None
        await self._send_late()

    async def end(self, ending: Ending) -> None:
        self._stop_timer()
        if self._late is not None:
            await self._late
        await self._outlet.send(self._take(ending))

    def close(self) -> None:
        self._stop_timer()
        if self._late is not None and not self._late.cancel() and not self._late.cancelled():
            self._late.exception()  # the reader went away while it was sent, which affects no one else

    def _take(self, ending: Ending | None) -> AnswerMessage:
        message = AnswerMessage(self._text, self._ids, self._logprobs, self._prompt, ending)
        self._text = ""
        self._count = 0
        self._prompt = None
        if self._keep_ids:
            self._ids, self._logprobs = [], []
        return message

    async def _send_late(self) -> None:
        if self._text or self._ids:
            await self._outlet.send(self._take(None))
        else:
            self._count = 0

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._late is None or self._late.done():
            self._late = asyncio.get_running_loop().create_task(self._send_late())
        else:
            self._start_timer()


def _sends_ids(request: Request) -> bool:
    return request.output.token_ids or request.output.logprobs is not None
