"""Names every metric family with its help, and every counted event with its family. Labels are never a caller's
text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Counted:
    family: str
    label: str = ""  # name of the event's own label; empty where it has none
    fixed: Labels = ()
    known: tuple[str, ...] = ()  # values of the label that are there from the start, as 0


@dataclass(frozen=True, slots=True)
class MetricFamily:
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


_OUTCOMES = ("hit", "miss", "fault")

EVENTS: Mapping[str, Counted] = {
    "response_lookup": Counted("cache_requests", "outcome", (("cache", "response"),), _OUTCOMES),
    "semantic_lookup": Counted("semantic_lookups", "verdict", (), ("strict", "learned", "unproven", "vetoed", "empty")),
    "semantic_veto": Counted("semantic_vetoes", "rule"),
    "semantic_skipped": Counted("cache_skipped", "reason", (("cache", "semantic"),)),
    "response_skipped": Counted("cache_skipped", "reason", (("cache", "response"),)),
    "response_not_kept": Counted("cache_not_kept", "reason", (("cache", "response"),)),
    "semantic_observed": Counted("semantic_observations", "outcome", (), ("right", "wrong")),
    "semantic_audit": Counted("semantic_audits", "outcome", (), ("done", "skipped", "failed")),
    "semantic_follow": Counted("semantic_index", "event"),
    "semantic_unavailable": Counted("semantic_unavailable", "error"),
    "cache_fault": Counted("cache_faults", "kind"),
    "cache_rejected": Counted("cache_rejected", "reason"),
    "cache_too_large": Counted("cache_too_large", "kind"),
    "cache_write_dropped": Counted("cache_writes_lost", "kind", (("reason", "dropped"),)),
    "cache_write_failed": Counted("cache_writes_lost", "", (("reason", "failed"), ("kind", ""))),
    "cache_dropped": Counted("cache_tasks_lost", "task", (("reason", "dropped"),)),
    "cache_beside": Counted("cache_tasks_lost", "reason", (("task", ""),)),
    "flight": Counted("flights", "role", (), ("lead", "follow")),
    "flight_replaced": Counted("flights_replaced"),
    "flight_shared": Counted("shared_flights", "event"),
    "block_gate": Counted("prefix_gate", "decision"),
    "block_chunks": Counted("prefix_chunks", "outcome"),
    "block_bytes": Counted("prefix_chunk_bytes", "direction"),
    "block_written": Counted("prefix_chunks_written"),
    "block_write_dropped": Counted("prefix_writes_lost", "", (("reason", "dropped"),)),
    "block_write_failed": Counted("prefix_writes_lost", "reason"),
    "block_fault": Counted("prefix_faults", "kind"),
    "block_rejected": Counted("prefix_rejected", "reason"),
    "tenants_file": Counted("tenants_file_reads", "outcome", (), ("read", "invalid")),
}
TIMES: Mapping[str, str] = {"response_lookup": "response", "semantic_lookup": "semantic", "block_fetch": "prefix"}


def _counter(help: str, *labels: str) -> MetricFamily:
    return MetricFamily("counter", labels, help)


def _gauge(help: str, *labels: str) -> MetricFamily:
    return MetricFamily("gauge", labels, help)


def _histogram(help: str, *labels: str) -> MetricFamily:
    return MetricFamily("histogram", labels, help)


FAMILIES: Mapping[str, MetricFamily] = {
    # What runs
    "build_info": _gauge("The version that runs.", "version"),
    "model_info": _gauge(
        "The model and how it is run.", "model", "architecture", "weight_format", "dtype", "device", "decoder"
    ),
    "limits": _gauge("How much there may be of something at once.", "kind"),
    "optimization_enabled": _gauge("Whether a switch is on and does something.", "name"),
    "optimization_requested": _gauge("Whether a switch is to be on.", "name"),
    "optimization_reverts": _counter("Times that a switch was turned back, since steps failed after it.", "name"),
    "engine_state": _gauge("1 for the state that the engine is in.", "state"),
    "engine_restarts": _counter("Times that the engine was started again."),
    "engine_deaths": _counter("Unintended ends of the engine process.", "reason"),
    "requests_quarantined": _counter("Requests that ended the engine process twice, and are not run any more."),
    "engine_load_progress": _gauge("How far each phase of loading is, from 0 to 1.", "phase"),
    "event_loop_lag_seconds": _histogram("How late the front's event loop was, ten times a second."),
    "relays": _gauge("Processes beside the front that speak gRPC."),
    "relay_deaths": _counter("Unintended ends of relays."),
    "tls_certificate_expiry_timestamp_seconds": _gauge("When a file's first certificate expires; Unix time.", "file"),
    "identity_reload_failures": _counter("Times that tokens or certificates were read again in vain.", "file"),
    # Requests
    "requests": _counter("Calls that have ended, by how.", "method", "code"),
    "requests_refused": _counter("Requests that were not let in.", "reason"),
    "tenants_file_reads": _counter("Times that the tenants file was read again.", "outcome"),
    "requests_live": _gauge("Requests that have not ended."),
    "requests_looking": _gauge("Of those, whose answer may yet be found in a cache."),
    "traces": _counter("Calls that were to be traced: exported, or dropped for a reason.", "outcome"),
    "generations": _gauge("Generations with their first token, and those that wait for it.", "state"),
    "draining": _gauge("Whether nothing new is let in."),
    "config_reloads": _counter("Times that the settings were read again."),
    "config_reload_failures": _counter("Times that they were wrong, and stayed as they were."),
    "access_log_left_out": _counter("Lines of calls that were left out of the log, since there were too many."),
    "time_to_first_token_seconds": _histogram("From a request's arrival to its first token.", "cache"),
    "inter_token_latency_seconds": _histogram("From token to token, as answers were read."),
    "e2e_request_latency_seconds": _histogram("From a request's arrival to the end of its answer.", "cache"),
    "request_queue_time_seconds": _histogram("From a request's arrival to its first step."),
    "request_prefill_time_seconds": _histogram("From its first step to its first token."),
    "request_decode_time_seconds": _histogram("From its first token to its last."),
    "request_prompt_tokens": _histogram("Tokens of a request's prompt."),
    "request_generation_tokens": _histogram("Tokens of an answer."),
    # Tenants that the tenants file wants named
    "tenant_requests": _counter("Calls of a tenant that have ended, by how.", "tenant", "code"),
    "tenant_tokens": _counter("Tokens of a tenant's prompts and answers.", "tenant", "kind"),
    "tenant_requests_live": _gauge("Requests of a tenant that have not ended.", "tenant"),
    "tenant_tokens_left": _gauge("Tokens that a tenant may still use; negative where it owes some.", "tenant"),
    # The engine
    "engine_sequences": _gauge("Sequences in the engine.", "state"),
    "engine_pages": _gauge(
        "Key-value pages: that sequences need, that are kept for prompts to come, and free ones.", "state"
    ),
    "kv_cache_usage_ratio": _gauge("Share of the key-value pages that sequences need."),
    "device_memory_bytes": _gauge("Memory of the GPU, in use by whatever process and in all.", "state"),
    "engine_steps": _counter("Steps."),
    "prompt_tokens": _counter("Prompt tokens of sequences that have begun."),
    "prompt_cached_tokens": _counter("Of those, whose keys and values were there."),
    "generated_tokens": _counter("Tokens generated."),
    "draft_proposed_tokens": _counter("Tokens guessed for speculative decoding."),
    "draft_accepted_tokens": _counter("Of those, that were right."),
    "preemptions": _counter("Times that a sequence was put back for want of pages."),
    # The caches
    "cache_requests": _counter("Lookups of requests, by what the cache had.", "cache", "outcome"),
    "cache_lookup_seconds": _histogram("How long lookups took.", "cache"),
    "cache_breaker_state": _gauge("Whether Redis is asked: 0 it is, 1 once to see, 2 it is not.", "pool"),
    "cache_bytes": _gauge("Bytes that a store holds in this process.", "store"),
    "cache_skipped": _counter("Requests that skipped a cache, by the reason.", "cache", "reason"),
    "cache_not_kept": _counter("Answers that were not kept, by the reason.", "cache", "reason"),
    "cache_faults": _counter("Commands that the caches' store did not answer in time or at all.", "kind"),
    "cache_rejected": _counter("Entries that were damaged, foreign or of an older version.", "reason"),
    "cache_too_large": _counter("Entries that were too large to keep.", "kind"),
    "cache_writes_lost": _counter("Entries that were not written, under pressure or by a fault.", "kind", "reason"),
    "cache_tasks_lost": _counter("Work beside requests that was dropped under pressure, or failed.", "task", "reason"),
    "semantic_lookups": _counter("Lookups of the semantic cache, by its verdict, served or not.", "verdict"),
    "semantic_vetoes": _counter("Nearest questions that a rule forbade to serve.", "rule"),
    "semantic_observations": _counter("Fresh answers beside what would have been served.", "outcome"),
    "semantic_audits": _counter("Served hits that were to be generated as well.", "outcome"),
    "semantic_index": _counter("Trouble in following what other servers store.", "event"),
    "semantic_unavailable": _counter("Times that the embedder could not be loaded.", "error"),
    "flights": _counter("Requests that could be shared: generated for all, or read along.", "role"),
    "flights_replaced": _counter("Generations that failed and were begun again for those who read along."),
    "shared_flights": _counter("Generations shared with other servers, by what became of them.", "event"),
    "prefix_gate": _counter("Decisions of fetching keys and values or computing them, by the ground.", "decision"),
    "prefix_chunks": _counter("Runs of keys and values that were asked for in Redis.", "outcome"),
    "prefix_chunk_bytes": _counter("Bytes of keys and values to and from Redis.", "direction"),
    "prefix_chunks_written": _counter("Runs of keys and values written to Redis."),
    "prefix_writes_lost": _counter("Runs of keys and values that were not written.", "reason"),
    "prefix_faults": _counter("Fetches that Redis did not answer in time or at all.", "kind"),
    "prefix_rejected": _counter("Runs of keys and values that were damaged or foreign.", "reason"),
    "unnamed_events": _counter("Events that have no family of their own.", "event"),
}
