"""Defines the engine's input and output as plain frozen data. No torch: the front process imports it.

Times are seconds on the clock of `time.monotonic`, which all processes of one Linux machine share.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import msgspec

from engine.errors import EngineUnavailable
from engine.settings import LogLevel

TRIAL_STEPS: Final = 256  # after which a switch is no longer blamed for steps that fail


class Priority(enum.IntEnum):
    """Waiting requests age, so that none waits forever."""

    BACKGROUND = 0
    NORMAL = 1
    INTERACTIVE = 2


AGING = 10.0  # seconds of waiting that weigh as much as one priority level


class FinishReason(enum.StrEnum):
    """Reasons of good endings, from engine to cache to wire. Failures are exceptions of `engine.errors`."""

    STOP = "stop"  # a stop token; which one is in Finish.stop_token_id
    LENGTH = "length"
    TIME_BUDGET = "time_budget"
    STOP_STRING = "stop_string"  # used by the front alone: the engine knows no text


class EngineState(enum.StrEnum):
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Order: logit_bias, the penalties (repetition over prompt and output; presence and frequency over output),
    temperature, top_k, top_p, min_p, then one draw whose noise is a function of (seed, position, token id) alone."""

    temperature: float  # 0 is greedy
    top_k: int  # 0 keeps all
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int  # 64 bits, unsigned
    logit_bias: tuple[tuple[int, float], ...] = ()


GREEDY = SamplingParams(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=0,
)
"""The likeliest token, and nothing else."""


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """Stop strings are text, hence checked by the front."""

    max_tokens: int  # 0 only with prompt_logprobs
    min_tokens: int = 0  # before it no stop token is drawn
    stop_token_ids: tuple[int, ...] = ()  # the model's end-of-text tokens included, unless ignored


class Constraint(msgspec.Struct, frozen=True):
    """Stop tokens are drawn where the grammar may end, and nowhere else; where nothing may follow, the answer ends
    without one, even before min_tokens."""

    grammar: str  # in the notation of llguidance
    owner: str = ""  # the caller whose share of memory and processes it takes


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str  # unique among live requests
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stopping: Stopping
    arrived_at: float
    logprobs: int | None = None  # None: none; n: the chosen token's and the n best
    draft_limit: int | None = None  # draft tokens a step; 0: it is not speculated; None: as many as pay
    prompt_logprobs: int | None = None  # likewise, of the prompt but its first token; finds no shared keys and values
    number: int = 0  # which of its siblings it is: the prompt is counted as the first one's
    siblings: int = 1  # sequences of this one prompt, itself included: they share one bound on what is unread
    priority: Priority = Priority.NORMAL
    forward: float = 0.0  # seconds that it is put forward in the queue, since it is its tenant's turn
    deadline: float | None = None  # past it the request fails
    expires_at: float | None = None  # past it the request finishes with TIME_BUDGET
    prefix_root: bytes = b""  # keys and values are shared among requests with equal ones: one a tenant
    bypass_prefix: bool = False  # neither uses shared keys and values nor leaves any
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Taken from the model's own distribution (no penalties, no temperature)."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    reason: FinishReason
    stop_token_id: int | None  # where a stop token ended it; it is then also the last of the token ids
    cached_tokens: int  # of the prompt, whose keys and values were there
    queue: float  # arrival → first planned, seconds
    prefill: float  # first planned → first token
    decode: float  # first token → last


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    cached_tokens: int
    queue: float  # as in Finish
    prefill: float


class TokenEvents(NamedTuple):
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # one an id, if asked for
    finish: Finish | None = None  # in the last event only
    start: Start | None = None  # in the first event with ids, or with nothing but the end
    draft_proposed: int = 0  # draft tokens that were verified for these ids
    draft_accepted: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's next tokens, from the second on; before all ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Objection:
    decoder: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """Why an optimisation does nothing for this model on this machine, on or off."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reverted:
    name: str
    enabled: bool  # as it is now
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerInfo:
    name: str
    why_not: str = ""  # empty where it is in use


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    architecture: str
    weight_format: str
    dtype: str  # of arithmetic
    kv_dtype: str  # of keys and values in their pages
    device: str
    decoder: str
    objections: tuple[Objection, ...]
    vocab_size: int
    max_context: int  # prompt and output, tokens; what model and page pool both allow
    max_sequences: int
    max_batch_tokens: int  # prompt tokens of a step
    page_size: int
    total_pages: int
    weights_bytes: int
    weights_digest: str  # SHA-256, hexadecimal
    texts_digest: str = ""  # of the files that decide how text and ids become each other; empty without a folder
    lookahead_tokens: int = 0  # how far beyond a row's first new token its pages must reach
    max_tokens_per_row: int = 1  # most ids that a step adds to a sequence
    unused: tuple[Unused, ...] = ()
    draft_model: str = ""  # its folder's name; empty where there is none
    proposers: tuple[ProposerInfo, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    counts: tuple[tuple[str, str, int], ...] = ()  # event, its label, how often
    times: tuple[tuple[str, tuple[int, ...], float], ...] = ()  # event, buckets of `cache.counters`, seconds
    breakers: tuple[tuple[str, str], ...] = ()  # connection, state


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    running: int = 0
    waiting: int = 0
    paused: int = 0
    most_running: int = 0  # that may run at once now; 0: not known
    used_pages: int = 0  # that live sequences need
    kept_pages: int = 0  # that are unused now, kept for prompts that begin alike
    total_pages: int = 0
    steps: int = 0
    begun: int = 0  # sequences that had their first token
    begun_cached: int = 0  # of those, with keys and values that were there
    prompt_tokens: int = 0  # of sequences that have begun
    cached_tokens: int = 0  # of those, whose keys and values were there
    generated_tokens: int = 0
    draft_proposed: int = 0  # draft tokens that were verified
    draft_accepted: int = 0
    preemptions: int = 0
    device_used_bytes: int = 0  # of a GPU's memory, by all processes
    device_bytes: int = 0  # 0 without a GPU
    tier: TierReport | None = None  # None where there is no shared tier


class TokenStream(Protocol):
    """Raises what `engine.errors` lists; ends after the event that carries `finish`."""

    def __aiter__(self) -> TokenStream: ...

    async def __anext__(self) -> TokenEvents: ...

    def batch(self, tokens: int, delay: float) -> None:
        """Holds events back until there are `tokens`, `delay` seconds after the first of them, or the end, for a reader
        that need not wake for each."""

    def cancel(self) -> None:
        """Frees slot and pages within a step. Every stream must be cancelled or read to its end."""

    def abort(self, reason: str) -> None:
        """Cancels; the reader gets `Aborted`."""


class Engine(Protocol):
    """The seam between front and engine: `engine.client` is the real one."""

    @property
    def state(self) -> EngineState: ...

    @property
    def info(self) -> ModelInfo | None:
        """None until it was ready once."""

    @property
    def load(self) -> EngineLoad: ...

    @property
    def restarts(self) -> int: ...

    @property
    def deaths(self) -> Mapping[str, int]:
        """Ends of its process that were not requested, by reason."""

    @property
    def quarantines(self) -> int:
        """Requests that were found to crash it, and are refused."""

    @property
    def reverted(self) -> Mapping[str, Reverted]:
        """Switches turned back and not set since."""

    @property
    def reverts(self) -> Mapping[str, int]:
        pass

    async def start(self) -> None:
        """Returns when the engine is ready. Raises InvalidModel or Unsupported where it never will be."""

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Raises EngineUnavailable unless the engine is ready."""

    def unavailable(self) -> EngineUnavailable: ...

    async def set_optimization(self, name: str, enabled: bool) -> None:
        """Returns when it is set. Raises Unsupported for an unknown name."""

    async def profile(self, seconds: float) -> str:
        """Stacks in the form of `engine.stacks`. Raises EngineUnavailable."""

    def set_log_level(self, level: LogLevel) -> None:
        """Applies to this engine process and later ones."""

    async def close(self) -> None: ...
