"""Collects the facts of one call in a builder, of which `RequestRecord` is made for metrics, log and traces when the
call has ended. It has no text of a prompt or an answer, and only checked identifiers of what a caller sent. This module
imports none of the rooms that fill it in."""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from service.observability.histogram import Histogram

UNKNOWN_METHOD = "unknown"  # what a caller made up is not repeated
_IDENTIFIER = re.compile(r"[!-~]{1,128}")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_log = logging.getLogger(__name__)

Metadata = Iterable[tuple[str, str | bytes]]


class RequestRecord(NamedTuple):
    """One call of any RPC. `_at` are seconds on the clock of `time.monotonic`, None for phases that were not
    reached."""

    method: str  # `whippet.v1.GenerationService/Generate`, or UNKNOWN_METHOD
    code: str  # of gRPC: `OK`, `CANCELLED`, …
    reason: str  # of a refusal, as callers get it in ErrorInfo; empty where there is none
    request_id: str  # the caller's or ours; empty where a call has none
    tenant: str  # empty where it is not known who calls
    operation: str  # `chat`, `text_completion`; empty where nothing is generated
    client_request_id: str  # metadata `x-request-id`; empty unless printable and short
    traceparent: str  # metadata of that name; empty unless well-formed
    trace_id: str  # 32 hexadecimal digits; empty unless the caller gave one, it is traced, or others may read along
    traced: bool  # it is to be sent to a collector
    span_id: str  # 16 hexadecimal digits, of this call; empty unless others may read its generation
    # Identical requests at one time: `leader`, `follower`, or empty where the answer could not be shared.
    role: str
    leader_request_id: str  # of a follower's leader in this process
    leader_trace_id: str
    leader_span_id: str
    streamed: bool  # an answer in messages as it comes
    started_at: float  # seconds since 1970
    arrived_at: float
    read_at: float | None  # its message was there
    admitted_at: float | None
    looked_up_at: float | None  # what the caches have was known
    submitted_at: float | None  # to the engine
    first_token_at: float | None
    last_token_at: float | None
    ended_at: float
    lookup: float  # seconds in the caches, up to looked_up_at
    queue: float | None  # seconds in the engine: arrival → first planned; None where it began nothing for this call
    prefill: float | None  # first planned → first token
    decode: float | None  # first token → last; None unless the engine ended it
    prompt_tokens: int
    cached_tokens: int  # of the prompt, that did not have to be computed
    completion_tokens: int
    draft_proposed: int  # tokens guessed for it
    draft_accepted: int
    cache: str  # header `x-cache`; empty before the caches were asked
    cache_source: str  # `none`, `response`, `semantic`; empty unless the answer ended well
    finish_reason: str  # empty unless the answer ended well
    bytes_in: int  # of the message
    bytes_out: int
    messages_out: int


_values = attrgetter(*RequestRecord._fields)

Observer = Callable[[RequestRecord], None]


class RecordBuilder:
    """A live call's record. Unset fields are the class's, which costs a call less."""

    code = reason = request_id = tenant = operation = ""
    client_request_id = traceparent = trace_id = span_id = ""
    role = leader_request_id = leader_trace_id = leader_span_id = ""
    streamed = traced = False
    read_at: float | None = None
    admitted_at: float | None = None
    looked_up_at: float | None = None
    submitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at = 0.0
    lookup = 0.0
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    prompt_tokens = cached_tokens = completion_tokens = 0
    draft_proposed = draft_accepted = 0
    cache = cache_source = finish_reason = ""
    bytes_in = bytes_out = messages_out = 0

    def __init__(
        self, method: str = "", metadata: Metadata = (), arrived_at: float = 0.0, intervals: Histogram | None = None
    ) -> None:
        self.method = method
        self.arrived_at = arrived_at
        self.started_at = time.time()
        self.intervals = intervals or Histogram(())  # where seconds between tokens are counted, as they come
        for key, value in metadata:
            if key == "x-request-id" and isinstance(value, str) and _IDENTIFIER.fullmatch(value):
                self.client_request_id = value
            elif key == "traceparent" and isinstance(value, str) and _TRACEPARENT.fullmatch(value):
                self.traceparent, self.trace_id = value, value[3:35]

    def span(self) -> tuple[str, str]:
        """Ids of trace and span for references to this call, made where there are none."""
        self.trace_id = self.trace_id or f"{random.getrandbits(128) or 1:032x}"
        self.span_id = self.span_id or f"{random.getrandbits(64) or 1:016x}"
        return self.trace_id, self.span_id

    def follows(self, leader: RecordBuilder) -> None:
        """Takes the facts of the call whose generation is read."""
        self.leader_request_id = leader.request_id
        self.leader_trace_id, self.leader_span_id = leader.span()

    def build(self) -> RequestRecord:
        return RequestRecord._make(_values(self))


Sample = Callable[[RecordBuilder], bool]  # whether a call that is ending is traced


class Observers:
    def __init__(
        self,
        observers: Sequence[Observer] = (),
        intervals: Histogram | None = None,
        sample: Sample | None = None,
    ) -> None:
        """`intervals` counts seconds between tokens as they arrive. `sample`: whether a call is traced."""
        self._observers = observers
        self._intervals = intervals
        self._sample = sample

    def begin(self, method: str, metadata: Metadata) -> RecordBuilder:
        return RecordBuilder(method, metadata, time.monotonic(), self._intervals)

    def end(self, builder: RecordBuilder, code: str) -> None:
        """Called once. A code that is set already stays."""
        builder.code = builder.code or code
        builder.ended_at = time.monotonic()
        if self._sample is not None and self._sample(builder):
            builder.traced = True
            builder.span()
        record = builder.build()
        for observe in self._observers:
            try:
                observe(record)
            except Exception as error:  # neither other observers nor the server are to suffer; its text may be anything
                _log.error("an observer of calls raised %s", type(error).__name__)
