"""Messages of an answer, the question they belong to, and the cache of exact ones.

Instants are seconds since the epoch (`time.time`), since values outlive a process; durations are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

Scalar = bool | int | float | str | bytes | None
Parameter = Scalar | tuple["Parameter", ...]


class AnswerPart(NamedTuple):
    """One message of a streamed answer. A named tuple, since a hit decodes hundreds of them."""

    token_ids: tuple[int, ...]
    text: str
    ending: AnswerEnding | None = None
    cuts: tuple[int, ...] = ()  # where in the text each id's share ends, the last one's left out; () without text


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnding:
    reason: str  # FinishReason's value; STOPPED lists those that came from the answer itself
    prompt_tokens: int
    completion_tokens: int
    stop_token_id: int | None = None
    stop_string: str | None = None


STOPPED = frozenset({"stop", "stop_string"})
LENGTH = "length"

LINGER = 1.0  # seconds that a finished generation can still be joined: by then its answer is in the store

# Compared by identity. A source may begin with it, to say that it was admitted before it has anything to deliver.
BEGUN = AnswerPart((), "")


class Generation(Protocol):
    """Read by one reader at a time."""

    async def next(self) -> AnswerPart:
        """The first call begins, and may give BEGUN. Nothing is lost when it is cancelled and called again. Raises
        LeaderRefused where it may not begin, and StopAsyncIteration where it breaks off."""

    def close(self) -> None:
        """Ends it, and soon a waiting `next`. May be called twice."""


Generate = Callable[[], Generation]


class Diverged(Exception):
    pass


class Unfinished(Exception):
    pass


class LeaderRefused(Exception):
    """Raised to a leader that was refused admission; the next reader becomes leader."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Covers everything about the model that shapes an answer and is not part of a request."""

    weights: str  # digest, in the format and dtype they are computed in
    tokenizer: str  # digest of tokenizer and chat template
    adapter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedCompletion:
    parts: tuple[AnswerPart, ...]  # the last one alone has an ending
    max_tokens: int  # of the request it was generated for
    provenance: str  # which executor, format and version wrote it
    created_at: float
    entry_id: str = ""  # the digest it is stored under; what FlushCache takes to delete it

    @property
    def ending(self) -> AnswerEnding:
        """Raises ValueError for an unfinished answer."""
        last = self.parts[-1].ending if self.parts else None
        if last is None:
            raise ValueError("an unfinished answer")
        return last

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(i for part in self.parts for i in part.token_ids)

    def replay(self) -> Iterator[AnswerPart]:
        """Yields the messages as they were streamed."""
        yield from self.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Built from the engine's request, so that nothing is left out."""

    tenant: str  # the authenticated identity, never a field of the request
    token_ids: tuple[int, ...]  # the whole rendered prompt
    parameters: tuple[tuple[str, Parameter], ...]  # all that shapes the answer except max_tokens, in a fixed order
    max_tokens: int
    deterministic: bool  # greedy, or with a seed of the caller's
    max_age: float | None = None  # older answers are misses
    # What the names of its answers are made of, once the cache has worked that out.
    encoded: list[bytes] = field(init=False, default_factory=list, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticTurn:
    """The last user turn is compared by meaning, all else exactly."""

    question: Question
    context: Parameter  # system prompt, history, template settings: anything that is not the last user turn
    text: str  # the last user turn
    greedy: bool
    plain: bool = True  # no tools, no grammar, no log-probabilities: nothing but text comes back
    caller: str = ""  # the finest identity that is known within the tenant; empty: callers are not distinguished
    threshold: float | None = None  # tightens the configured one; a lower value changes nothing


class ResponseCache(Protocol):
    """Nothing here raises, and nothing takes longer than the store's budget."""

    async def get(self, question: Question, allowance: Allowance) -> CachedCompletion | None: ...

    async def put(self, question: Question, completion: CachedCompletion) -> bool:
        """False where the answer is not one to keep, or was dropped under pressure."""


class Allowance:
    """Limits how long one request waits for stores, all its lookups together."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left = seconds
        self._clock = clock

    @property
    def left(self) -> float:
        return max(self._left, 0.0)

    @contextmanager
    def spending(self) -> Iterator[float]:
        """Yields the seconds left; takes off the time spent inside the block."""
        begun = self._clock()
        try:
            yield self.left
        finally:
            self._left -= self._clock() - begun
