"""What the caches take and give, as plain frozen data, and the protocols behind them. Standard library only.

Instants are seconds since the epoch (`time.time`), since values outlive a process; durations are seconds.
"""

from __future__ import annotations

import enum
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Scalar = bool | int | float | str | bytes | None
Parameter = Scalar | tuple["Parameter", ...]

_NAME = re.compile(r"[0-9a-f]{8,128}\Z")


class StoreFault(Exception):
    """The store could not answer. Never leaves this package on a request's path: there it is a miss, counted."""


class Kind(enum.StrEnum):
    """What an entry is. The value is the first part of its name in the store."""

    RESPONSE = "r"
    SEMANTIC = "s"
    DIRECTORY = "d"  # which semantic entries a partition has
    EVIDENCE = "v"  # what was observed of semantic candidates
    BLOCK = "k"
    EPOCH = "e"  # the random number that stands for a tenant's present
    LEASE = "l"  # who generates an answer at the moment
    FLIGHT = "f"  # the answer being generated


@dataclass(frozen=True, slots=True)
class CacheKey:
    """The name of one entry. Both parts are keyed digests, so that a name tells nothing about a prompt."""

    kind: Kind
    partition: str
    digest: str

    def __post_init__(self) -> None:
        if not _NAME.match(self.partition) or not _NAME.match(self.digest):
            raise ValueError("partition and digest are lower-case hexadecimal")

    @property
    def name(self) -> str:
        """As it stands in the store."""
        return f"{self.kind.value}:{self.partition}:{self.digest}"


class Store(Protocol):
    """Bytes by name, with an age limit. Two exist, `memory` and `redis_store`, under one set of contract tests.

    Every method but `offer` raises StoreFault where the store cannot answer in time.
    """

    async def get_many(self, keys: Sequence[CacheKey], within: float | None = None) -> tuple[bytes | None, ...]:
        """One value a key, None where there is none. `within` shortens the store's own budget, in seconds."""

    async def set(self, key: CacheKey, value: bytes, ttl: float) -> None: ...

    async def set_if_absent(self, key: CacheKey, value: bytes, ttl: float, within: float | None = None) -> bytes:
        """The value that stands afterwards: the given one, or the one that was first."""

    def offer(self, key: CacheKey, value: bytes, ttl: float, directory: CacheKey | None = None) -> bool:
        """Sets soon, off the caller's path, and enrols the key in the directory. False: dropped under pressure."""

    async def delete_many(self, keys: Sequence[CacheKey]) -> int:
        """How many there were."""

    def scan(self, kind: Kind, partition: str) -> AsyncIterator[CacheKey]:
        """Every live key of a partition that was there when the scan began, possibly more."""

    async def enrolled(self, directory: CacheKey, after: float, count: int, within: float | None = None) -> Enrolment:
        """The members that were enrolled after a cursor, oldest first, at most `count`."""

    async def add(self, key: CacheKey, amounts: Mapping[str, int], ttl: float) -> None:
        """Adds to named counters; commutes with everybody else's additions."""

    async def counts(self, keys: Sequence[CacheKey], within: float | None = None) -> tuple[Mapping[str, int], ...]:
        """The counters of each key, empty where there are none."""

    async def read(
        self, keys: Sequence[CacheKey], counted: Sequence[CacheKey], within: float | None = None
    ) -> tuple[tuple[bytes | None, ...], tuple[Mapping[str, int], ...]]:
        """`get_many` and `counts` in one."""

    async def aclose(self) -> None: ...


class Allowance:
    """How long one request may still wait for stores, all its lookups together. Made for it, and passed along."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left = seconds
        self._clock = clock

    @property
    def left(self) -> float:
        """Seconds, never negative."""
        return max(self._left, 0.0)

    @contextmanager
    def spending(self) -> Iterator[float]:
        """What passes inside is taken off; yields what there is."""
        begun = self._clock()
        try:
            yield self.left
        finally:
            self._left -= self._clock() - begun


@dataclass(frozen=True, slots=True)
class Enrolment:
    """A page of a directory."""

    members: tuple[tuple[str, float], ...]  # (digest, cursor)
    total: int  # members altogether


class AnswerPart(NamedTuple):
    """One message of an answer as it was streamed: what it added, and in the last one how it ended. A named tuple,
    since hundreds of them are made of a stored answer that somebody waits for."""

    token_ids: tuple[int, ...]
    text: str
    ending: AnswerEnding | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnding:
    """How an answer ended."""

    reason: str  # engine or service's word for it; STOPPED lists those that came from the answer itself
    prompt_tokens: int
    completion_tokens: int
    stop_token_id: int | None = None
    stop_string: str | None = None


STOPPED = frozenset({"stop", "stop_string"})
LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedCompletion:
    """A finished answer with the borders of its messages."""

    parts: tuple[AnswerPart, ...]  # the last one alone has an ending
    max_tokens: int  # what it was generated under
    provenance: str  # which decoder, format and version wrote it
    created_at: float
    entry_id: str = ""  # the digest it is stored under; what FlushCache takes to delete it

    @property
    def ending(self) -> AnswerEnding:
        """How it ended. Raises ValueError where it has none."""
        last = self.parts[-1].ending if self.parts else None
        if last is None:
            raise ValueError("an unfinished answer")
        return last

    @property
    def text(self) -> str:
        """The whole of it."""
        return "".join(part.text for part in self.parts)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids."""
        return tuple(i for part in self.parts for i in part.token_ids)

    def replay(self) -> Iterator[AnswerPart]:
        """The messages as they were streamed; no pacing, the reader's back-pressure is the only brake."""
        yield from self.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request as the caches see it: whoever asks builds it from what the engine would be given."""

    tenant: str  # the authenticated identity, never a field of the request
    token_ids: tuple[int, ...]  # the whole rendered prompt
    parameters: tuple[tuple[str, Parameter], ...]  # all that shapes the answer, max_tokens aside, in a fixed order
    max_tokens: int
    deterministic: bool  # greedy, or with a seed of the caller's
    max_age: float | None = None  # older answers are misses


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The fuzzy part of a question: its last user turn, beside what must match exactly."""

    question: Question
    context: bytes  # system prompt, history, template settings: anything that is not the last user turn
    text: str  # the last user turn
    greedy: bool
    plain: bool = True  # no tools, no grammar, no log-probabilities: nothing but text comes back
    threshold: float | None = None  # tightens the configured one; a lower value changes nothing


class Mode(enum.StrEnum):
    """What the semantic cache may do."""

    OFF = "off"
    SHADOW = "shadow"  # decides and records, never serves
    ON = "on"


class Verdict(enum.StrEnum):
    """What became of a semantic lookup."""

    SKIPPED = "skipped"  # not eligible
    EMPTY = "empty"  # nothing near enough
    VETOED = "vetoed"
    UNPROVEN = "unproven"  # near, not vetoed, but neither equal in words nor with enough evidence
    STRICT = "strict"  # equal in words
    LEARNED = "learned"  # enough evidence
    FAULT = "fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticLookup:
    """What the semantic cache found and decided."""

    verdict: Verdict
    served: CachedCompletion | None = None  # in mode `on` alone
    candidate: Candidate | None = None  # what would be, or was, served or learned from
    veto: str = ""  # the rule that vetoed the nearest
    audit: bool = False  # generate off the path as well, and hand the answer to `observe`


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A stored question near enough to be considered, with its answer."""

    entry: CacheKey
    similarity: float
    strict: bool
    completion: CachedCompletion


class ResponseCache(Protocol):
    """Exact answers. Nothing here raises, and nothing takes longer than the store's budget."""

    async def get(self, question: Question, allowance: Allowance) -> CachedCompletion | None: ...

    async def put(self, question: Question, completion: CachedCompletion) -> bool:
        """False where the answer is not one to keep, or was dropped under pressure."""


class SemanticCache(Protocol):
    """Answers to questions that mean the same. Nothing here raises."""

    def begin(self, turn: Turn) -> Callable[[], object]:
        """Starts on what a `lookup` that is likely to follow can do without the store. The result gives it up."""

    async def lookup(self, turn: Turn, allowance: Allowance) -> SemanticLookup: ...

    async def put(self, turn: Turn, completion: CachedCompletion) -> bool: ...

    async def observe(self, lookup: SemanticLookup, generated: CachedCompletion) -> None:
        """Learns from a fresh answer whether the candidate's would have done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """What the bytes of keys and values mean. Two engines share blocks only where all of it is equal."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str  # as it is stored
    item_bytes: int
    page_size: int  # tokens
    variant: str = ""  # order of axes, rope, rank and size of a tensor-parallel group, attention backend

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.item_bytes


@dataclass(frozen=True, slots=True)
class BlockChunk:
    """One run of whole pages: where it stands in the chain of hashes."""

    hash: bytes  # 32 bytes; of all tokens up to its end, and of all that shapes keys and values
    parent: bytes  # of the chunk before, or the chain's root
    tokens: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came of fetching."""

    chunks: int  # that arrived, from the first on without a gap
    seconds: float


class BlockStore(Protocol):
    """Keys and values that outlive the engine, for its plain threads. Nothing here raises; a fault is a miss."""

    @property
    def chunk_tokens(self) -> int:
        """Whole pages, about as many as the configured bytes hold."""

    def worth(self, tokens: int) -> float | None:
        """Seconds to wait for a fetch of so many tokens at most; None: recompute, that is predicted to be faster."""

    def fetch(
        self, partition: str, chunks: Sequence[BlockChunk], into: Sequence[memoryview], within: float
    ) -> Future[Fetched]:
        """Fills the buffers, one a chunk, on a thread of the store's own. They may be written to until it is done."""

    def used(self, partition: str, chunk: BlockChunk) -> bool:
        """Notes a use. True: worth keeping, call `keep`."""

    def keep(self, partition: str, chunk: BlockChunk, payload: memoryview) -> bool:
        """Copies, and writes in the background. False: dropped under pressure."""

    def computed(self, tokens: int, seconds: float) -> None:
        """A prefill was measured."""

    def close(self) -> None: ...


class Counter(Protocol):
    """Where counts and times go. Labels are names of rules and states, never a caller's text."""

    def count(self, event: str, label: str = "", amount: int = 1) -> None: ...

    def observe(self, event: str, seconds: float) -> None: ...
