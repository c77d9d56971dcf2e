"""Writes docs/operations/metrics.md: every metric family of the server, with the values of its labels."""

from __future__ import annotations

from collections.abc import Mapping

from scripts.cells import table
from service.observability.metric_names import EVENTS, FAMILIES, MetricFamily

HEAD = """# Metrics

`python -m scripts.references` writes this page from `service/observability/metric_names.py`. All names begin with
`whippet_`. [Monitoring](monitoring.md#metrics) has the port and the equivalents of other servers' names. Histograms
have classic buckets, from 1 ms to 10 minutes (between tokens: 0.5 ms to 2.5 s).
"""
# What the one sentence in the code has no room for.
NOTES: Mapping[str, str] = {
    "build_info": "Always 1.",
    "model_info": "Always 1.",
    "limits": "Kinds: `sequences` that run at once, requests `waiting` for that, `pages` and `page_tokens` of the KV"
    " cache, `context_tokens` of a request.",
    "engine_deaths": "Reasons: `hung`, `ended` (by itself), `killed`, `out_of_memory` (by the kernel), `not_started`."
    " Planned ends are not counted.",
    "requests_quarantined": "They are [refused](failures.md#what-fails-how).",
    "tls_certificate_expiry_timestamp_seconds": "Files: `cert` (ours and its chain), `client-ca`. Only with TLS.",
    "identity_reload_failures": "Files: `tokens`, `certificates`. What was in force stays in force.",
    "relays": "Those that [listen](limits.md#several-front-processes).",
    "event_loop_lag_seconds": "Its timers count whole milliseconds.",
    "requests": "All RPCs, health included. An RPC that does not exist has the method `unknown`.",
    "time_to_first_token_seconds": "Answers that ended well. `cache` is where they came from: `none`, `response` (also"
    " for followers), `semantic`. The first token of a unary answer is the engine's.",
    "e2e_request_latency_seconds": "Answers that ended well; `cache` as above.",
    "inter_token_latency_seconds": "Every token after the first part of an answer, at the pace at which it was read,"
    " without cache hits. A message of n tokens counts n times a share of the time.",
    "request_queue_time_seconds": "Answers that ended well and were generated for their caller.",
    "request_prefill_time_seconds": "The same answers.",
    "request_decode_time_seconds": "The same answers.",
    "request_prompt_tokens": "Answers that ended well.",
    "request_generation_tokens": "Answers that ended well.",
    "traces": "Outcomes: `exported`; dropped because too many waited (`queue`), because the collector refused them"
    " (`refused`) or did not take them (`failed`), or because the server stopped (`shutdown`).",
    "requests_refused": "Reasons: `QUEUE_FULL`, `QUEUED_TOKENS`, `MESSAGES`, `TENANT_QUOTA`, `TENANT_TOKENS`,"
    " `LIVE_REQUESTS`, `QUEUE_TIMEOUT`, `DEADLINE`, `DRAINING`.",
    "generations": "The front's view. States: `running`, `waiting`.",
    "tenant_requests": "Only tenants with `metrics: true` in the [tenants file](access.md#quotas).",
    "tenant_tokens": "The same tenants. Kinds: `prompt`, `generated`, of every call that got some.",
    "tenant_requests_live": "The same tenants.",
    "tenant_tokens_left": "The same tenants.",
    "engine_sequences": "The engine's view. States: `running`, `waiting`, `paused`.",
    "engine_pages": "States: `used`, `kept`, `free`.",
    "device_memory_bytes": "States: `used`, `total`. At most ten seconds old under load.",
    "cache_requests": "Caches: `response`, `semantic`, `prefix`. Outcomes: `hit`, `miss`, `fault`, `skipped`, and"
    " `shadow` for what would have been a hit.",
    "cache_faults": "Kinds: `breaker`, `TimeoutError`, `ConnectionError`, …",
    "cache_breaker_state": "0 closed, 1 probing, 2 open, as of its last use.",
    "cache_bytes": "Stores: `memory`, or what waits to be written to Redis.",
}


def metrics_page() -> str:
    rows = (
        [f"`{exported(name, family)}`", family.kind, labels(family), text(name)] for name, family in FAMILIES.items()
    )
    return f"{HEAD}\n{table(['metric', 'type', 'labels', 'meaning'], rows)}"


def exported(name: str, family: MetricFamily) -> str:
    """Returns the name in Prometheus, without the prefix."""
    return f"{name}_total" if family.kind == "counter" else name


def labels(family: MetricFamily) -> str:
    return ", ".join(f"`{name}`" for name in family.labels)


def text(name: str) -> str:
    """Returns the family's sentence, its note, and the values of an event's label that are known in advance."""
    known = next((event.known for event in EVENTS.values() if event.family == name and event.known), ())
    values = f"Values: {', '.join(f'`{value}`' for value in known)}." if known and name not in NOTES else ""
    return " ".join(filter(None, (FAMILIES[name].help, NOTES.get(name, ""), values)))
