"""Names of metrics: every event that is counted has its family here, and every family its one sentence.

Labels are names of rules and states, never a caller's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """The family that an event is counted in, and with which labels."""

    family: str
    label: str = ""  # name of the event's own label; empty where it has none
    fixed: Labels = ()
    known: tuple[str, ...] = ()  # values of the label that are there from the start, as 0


@dataclass(frozen=True, slots=True)
class Family:
    """Counters with one name."""

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
}
TIMES: Mapping[str, str] = {"response_lookup": "response", "semantic_lookup": "semantic", "block_fetch": "prefix"}

FAMILIES: Mapping[str, Family] = {
    "cache_requests": Family(("cache", "outcome"), "Lookups of requests, by what the cache had."),
    "cache_skipped": Family(("cache", "reason"), "Requests that skipped a cache, by the reason."),
    "cache_not_kept": Family(("cache", "reason"), "Answers that were not kept, by the reason."),
    "cache_faults": Family(("kind",), "Commands that the caches' store did not answer in time or at all."),
    "cache_rejected": Family(("reason",), "Entries that were damaged, foreign or of an older version."),
    "cache_too_large": Family(("kind",), "Entries that were too large to keep."),
    "cache_writes_lost": Family(("kind", "reason"), "Entries that were not written, under pressure or by a fault."),
    "cache_tasks_lost": Family(("task", "reason"), "Work beside requests that was dropped under pressure, or failed."),
    "semantic_lookups": Family(("verdict",), "Lookups of the semantic cache, by its verdict, served or not."),
    "semantic_vetoes": Family(("rule",), "Nearest questions that a rule forbade to serve."),
    "semantic_observations": Family(("outcome",), "Fresh answers beside what would have been served."),
    "semantic_audits": Family(("outcome",), "Served hits that were to be generated as well."),
    "semantic_index": Family(("event",), "Trouble in following what other servers store."),
    "semantic_unavailable": Family(("error",), "Times that the embedder could not be loaded."),
    "flights": Family(("role",), "Requests that could be shared: generated for all, or read along."),
    "flights_replaced": Family((), "Generations that failed and were begun again for those who read along."),
    "shared_flights": Family(("event",), "Generations shared with other servers, by what became of them."),
    "prefix_gate": Family(("decision",), "Decisions of fetching keys and values or computing them, by the ground."),
    "prefix_chunks": Family(("outcome",), "Runs of keys and values that were asked for in Redis."),
    "prefix_chunk_bytes": Family(("direction",), "Bytes of keys and values to and from Redis."),
    "prefix_chunks_written": Family((), "Runs of keys and values written to Redis."),
    "prefix_writes_lost": Family(("reason",), "Runs of keys and values that were not written."),
    "prefix_faults": Family(("kind",), "Fetches that Redis did not answer in time or at all."),
    "prefix_rejected": Family(("reason",), "Runs of keys and values that were damaged or foreign."),
    "requests_refused": Family(("reason",), "Requests that were not let in."),
    "unnamed_events": Family(("event",), "Events that have no family of their own."),
}
