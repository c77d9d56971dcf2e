"""Plain data of the use cases: a valid request, facts of the model, and how an answer ended."""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

from engine.api import FinishReason, Priority, SamplingParams
from service.core.text import NO_OPTIONS, ChatMessage, ChatOptions
from service.observability.record import RecordBuilder


class TextPrompt(msgspec.Struct, frozen=True):
    """`field` names the request's field in violations."""

    text: str
    field: ClassVar[str] = "text"
    continues: ClassVar[bool] = True  # the answer goes on from the prompt's last word


class TokenPrompt(msgspec.Struct, frozen=True):
    ids: tuple[int, ...]
    field: ClassVar[str] = "token_ids.ids"
    continues: ClassVar[bool] = True


class ChatPrompt(msgspec.Struct, frozen=True):
    messages: tuple[ChatMessage, ...]
    options: ChatOptions = NO_OPTIONS
    field: ClassVar[str] = "chat.messages"

    @property
    def continues(self) -> bool:
        return self.options.continue_final_message


class ConstraintText(msgspec.Struct, frozen=True):
    """A constraint as the caller wrote it."""

    kind: str  # as `service.core.text.constraint` knows them
    texts: tuple[str, ...]  # one; of a choice, its options
    field: str


Prompt = TextPrompt | TokenPrompt | ChatPrompt


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    vocab_size: int
    max_context: int  # tokens
    chat: bool
    eos_token_ids: tuple[int, ...]
    defaults: SamplingParams  # its seed means nothing
    most_tokens: int | None = None  # of an answer, where the request names no limit; None: what the context leaves


COALESCING_DELAY = 0.2  # seconds, where the caller says nothing: no bound of its own


class Delivery(msgspec.Struct, frozen=True):
    max_tokens: int
    max_delay: float  # seconds
    # While many are served, messages hold whatever has come, and a token waits at most this many seconds for others of
    # its stream; None: a message's size is fixed.
    coalescing_delay: float | None = None


class Output(msgspec.Struct, frozen=True):
    text: bool
    token_ids: bool
    logprobs: int | None
    parse: bool = True  # reasoning and calls apart from text
    prompt_logprobs: int | None = None
    skip_special: bool = True  # tokens, in text


class Stops(msgspec.Struct, frozen=True, kw_only=True):
    max_tokens: int | None
    min_tokens: int
    fitted: bool = False  # a max_tokens beyond the context is as many as it leaves, and not refused
    strings: tuple[str, ...]
    token_ids: tuple[int, ...]  # the model's own included, unless ignored
    include: bool


class Access(msgspec.Struct, frozen=True):
    read: bool
    write: bool


class CacheUse(msgspec.Struct, frozen=True, kw_only=True):
    response: Access | None = None  # None: the server's own setting, as below
    semantic: Access | None = None
    bypass_prefix: bool = False
    max_age: float | None = None  # seconds
    threshold: float | None = None  # cosine; tightens the server's


class Request(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    stops: Stops
    output: Output
    priority: Priority
    time_budget: float | None  # seconds
    delivery: Delivery
    cache: CacheUse
    seeded: bool  # by the caller
    constraint: ConstraintText | None = None
    draft_limit: int | None = None  # draft tokens at once; 0: none; None: as many as pay
    answers: int = 1


class Origin(msgspec.Struct, frozen=True, eq=False):
    """Times are seconds on the clock of `time.monotonic`."""

    tenant: str
    arrived_at: float
    deadline: float | None
    caller: str = ""  # which of the tenant's tokens; empty: all callers look alike
    record: RecordBuilder = msgspec.field(default_factory=RecordBuilder)  # what is seen of the call


class PromptFacts(msgspec.Struct, frozen=True):
    request_id: str
    model: str
    prompt_tokens: int
    cache: str  # the header `x-cache`
    first_id: int = 0  # of the prompt


class CacheSource(enum.Enum):
    NONE = enum.auto()
    RESPONSE = enum.auto()
    SEMANTIC = enum.auto()


class CacheOutcome(msgspec.Struct, frozen=True, kw_only=True):
    header: str  # as in PromptFacts.cache
    source: CacheSource = CacheSource.NONE
    lookup: float = 0.0  # seconds that it took
    entry_id: str = ""
    age: float = 0.0  # seconds
    similarity: float | None = None


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """Times are durations in seconds."""

    reason: FinishReason
    sampling: SamplingParams
    prompt_tokens: int  # of several answers, the first one's
    completion_tokens: int
    cached_tokens: int
    draft_proposed: int
    draft_accepted: int
    queue: float
    prefill: float
    decode: float
    outcome: CacheOutcome
    stop_string: str | None = None
    stop_token_id: int | None = None
