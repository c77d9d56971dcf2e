"""Counts calls that have ended, and latencies and tokens of those that generated. Buckets are classic:
prometheus_client does not write the protobuf format that native histograms need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from service.observability.histogram import Histogram, merged
from service.observability.record import RequestRecord

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0),
)
_BETWEEN = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02),
    *(0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5),
)
_TOKENS = tuple(float(2**power) for power in range(0, 18))
_SOURCES = ("none", "response", "semantic")

Rows = dict[tuple[str, ...], float | Histogram]


class CallCounts:
    """Rows are by label values, for the families of `metric_names`."""

    def __init__(self) -> None:
        self.between = Histogram(_BETWEEN)  # seconds from token to token, added to while answers are read
        self._requests: Counter[tuple[str, str]] = Counter()
        self._tenants: Counter[tuple[str, str]] = Counter()  # calls by tenant and code
        self._tokens: Counter[tuple[str, str]] = Counter()  # by tenant and kind
        self._first = {source: Histogram(_SECONDS) for source in _SOURCES}
        self._whole = {source: Histogram(_SECONDS) for source in _SOURCES}
        self._queue, self._prefill, self._decode = Histogram(_SECONDS), Histogram(_SECONDS), Histogram(_SECONDS)
        self._prompt, self._answer = Histogram(_TOKENS), Histogram(_TOKENS)

    def __call__(self, record: RequestRecord) -> None:
        self._requests[record.method, record.code] += 1
        if record.tenant:
            self._tenants[record.tenant, record.code] += 1
        if record.completion_tokens:
            self._tokens[record.tenant, "prompt"] += record.prompt_tokens
            self._tokens[record.tenant, "generated"] += record.completion_tokens
        if not record.finish_reason:
            return
        source = record.cache_source
        self._first[source].add(_until_first(record))
        self._whole[source].add(record.ended_at - record.arrived_at)
        self._prompt.add(record.prompt_tokens)
        self._answer.add(record.completion_tokens)
        for histogram, seconds in (
            (self._queue, record.queue),
            (self._prefill, record.prefill),
            (self._decode, record.decode),
        ):
            if seconds is not None:
                histogram.add(seconds)

    def ended(self, methods: Collection[str]) -> Counter[str]:
        found: Counter[str] = Counter()
        for (method, code), count in self._requests.items():
            if method in methods:
                found[code] += count
        return found

    def seconds(self) -> Mapping[str, Histogram]:
        """Callers' waiting times, whatever the source of their answers."""
        return {
            "first_token": merged(self._first.values()),
            "between_tokens": self.between,
            "whole": merged(self._whole.values()),
            "queue": self._queue,
        }

    def families(self) -> Iterator[tuple[str, Rows]]:
        yield "requests", {key: count for key, count in self._requests.items()}
        yield "time_to_first_token_seconds", {(source,): one for source, one in self._first.items()}
        yield "e2e_request_latency_seconds", {(source,): one for source, one in self._whole.items()}
        for name, histogram in (
            ("inter_token_latency_seconds", self.between),
            ("request_queue_time_seconds", self._queue),
            ("request_prefill_time_seconds", self._prefill),
            ("request_decode_time_seconds", self._decode),
            ("request_prompt_tokens", self._prompt),
            ("request_generation_tokens", self._answer),
        ):
            yield name, {(): histogram}

    def of_tenants(self, named: Collection[str]) -> Iterator[tuple[str, Rows]]:
        for name, counts in (("tenant_requests", self._tenants), ("tenant_tokens", self._tokens)):
            yield name, {(tenant, what): count for (tenant, what), count in counts.items() if tenant in named}


def _until_first(record: RequestRecord) -> float:
    """Seconds to the first token. A unary answer is read in large parts, so that the engine's time is more exact."""
    if not record.streamed and record.queue is not None and record.prefill is not None:
        return record.queue + record.prefill
    return (record.first_token_at or record.ended_at) - record.arrived_at
