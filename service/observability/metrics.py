"""Metrics for Prometheus, read at each scrape from counters that exist anyhow; names stand in `metric_names`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from cache.api import BORDERS, Mode
from engine.api import Engine, EngineLoad, EngineState
from service.core.admission.admission import Admission
from service.core.answers.caches import AnswerCaches
from service.core.switches import OptimizationSwitches
from service.observability.calls import Rows
from service.observability.histogram import Histogram
from service.observability.instruments import Instruments
from service.observability.metric_names import EVENTS, FAMILIES, TIMES, Counted
from service.transport.identity.identity import Identity
from service.version import version

Counts = Mapping[tuple[str, str], int]  # (event, label) → count


# What a verdict of the semantic cache meant for the request; in shadow nothing is served.
_OUTCOMES = {"empty": "miss", "vetoed": "miss", "unproven": "miss"}
_FOUND = ("strict", "learned")
_KINDS: Mapping[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
_BREAKERS = {"closed": 0, "probing": 1, "open": 2}


class Metrics:
    """Reads counters on the event loop that changes them."""

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        caches: AnswerCaches,
        switches: OptimizationSwitches,
        model_name: str,
        instruments: Instruments,
        identity: Identity,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._caches = caches
        self._switches = switches
        self._model_name = model_name
        self._instruments = instruments
        self._identity = identity
        self._version = version()  # read from a file

    def families(self) -> list[Metric]:
        load = self._engine.load
        return [
            *self._process(),
            *self._requests(),
            *(_family(name, rows) for name, rows in self._instruments.calls.families()),
            *self._tenants(),
            *_engine(load),
            *self._counted(load),
            *self._cached(),
        ]

    def _process(self) -> Iterator[Metric]:
        engine, info = self._engine, self._engine.info
        yield _by("build_info", {self._version: 1})
        limits = {"waiting": self._admission.slots.total - self._admission.slots.capacity}
        if info is not None:
            facts = (info.architecture, info.weight_format, info.dtype, info.device, info.decoder)
            yield _family("model_info", {(self._model_name, *facts): 1})
            limits |= {
                "sequences": info.max_sequences,
                "pages": info.total_pages,
                "page_tokens": info.page_size,
                "context_tokens": info.max_context,
            }
        yield _by("limits", limits)
        yield _by("engine_state", {state.value: int(state is engine.state) for state in EngineState})
        yield _one("engine_restarts", engine.restarts)
        yield _by("engine_deaths", engine.deaths)
        yield _one("requests_quarantined", engine.quarantines)
        yield _by("engine_load_progress", self._instruments.progress.phases)
        yield from _optimizations(self._switches)
        yield _one("config_reloads", self._instruments.reloads["reloads"])
        yield _one("config_reload_failures", self._instruments.reloads["failures"])
        yield _one("event_loop_lag_seconds", self._instruments.lag.seconds)
        yield _one("relays", self._instruments.relays["listening"])
        yield _one("relay_deaths", self._instruments.relays["deaths"])
        yield _by("tls_certificate_expiry_timestamp_seconds", self._identity.expiries)
        yield _by("identity_reload_failures", self._identity.failures)

    def _requests(self) -> Iterator[Metric]:
        admission, slots = self._admission, self._admission.slots
        yield _one("requests_live", admission.live)
        yield _one("requests_looking", admission.in_lookup)
        yield _by("generations", {"running": slots.taken - slots.waiting, "waiting": slots.waiting})
        yield _one("draining", int(admission.draining))
        yield _one("access_log_left_out", self._instruments.access.left_out)
        yield _by("traces", self._instruments.traces)

    def _tenants(self) -> Iterator[Metric]:
        uses = self._admission.uses
        yield _by("tenant_requests_live", {use.tenant: use.live for use in uses})
        yield _by("tenant_tokens_left", {use.tenant: use.tokens_left for use in uses if use.tokens_left is not None})
        for name, rows in self._instruments.calls.of_tenants({use.tenant for use in uses}):
            yield _family(name, rows)

    def _counted(self, load: EngineLoad) -> Iterator[Metric]:
        rows = _Rows()
        for counted in EVENTS.values():
            for value in counted.known:
                rows.add(counted, value, 0)
        counts: Counts = self._caches.counts()
        for (event, label), count in counts.items():
            found = EVENTS.get(event)
            if found is None:
                rows.add(Counted("unnamed_events", "event"), f"{event}.{label}" if label else event, count)
            else:
                rows.add(found, label, count)
        self._outcomes(rows, counts)
        for reason, count in self._admission.slots.refusals.items():
            rows.add(Counted("requests_refused", "reason"), reason, count)
        prefix = Counted("cache_requests", "outcome", (("cache", "prefix"),))
        rows.add(prefix, "hit", load.begun_cached)
        rows.add(prefix, "miss", load.begun - load.begun_cached)
        yield from rows.families()

    def _outcomes(self, rows: _Rows, counts: Counts) -> None:
        if self._caches.semantic_mode is Mode.OFF:
            return
        served = "hit" if self._caches.semantic_mode is Mode.ON else "shadow"
        semantic = Counted("cache_requests", "outcome", (("cache", "semantic"),))
        for word in (served, "miss", "fault", "skipped"):
            rows.add(semantic, word, 0)
        for (event, label), count in counts.items():
            if event == "semantic_lookup":
                rows.add(semantic, served if label in _FOUND else _OUTCOMES.get(label, label), count)

    def _cached(self) -> Iterator[Metric]:
        lookups: dict[str, Histogram] = {}
        for event, took in self._caches.times().items():
            if event in TIMES:
                histogram = lookups[TIMES[event]] = Histogram(BORDERS)
                histogram.counts, histogram.total = list(took.buckets), took.total
        yield _by("cache_lookup_seconds", lookups)
        breakers = self._caches.breakers() | self._admission.quotas.breakers
        yield _by("cache_breaker_state", {pool: _BREAKERS[state] for pool, state in breakers.items()})
        yield _by("cache_bytes", self._caches.held())


def _optimizations(switches: OptimizationSwitches) -> Iterator[Metric]:
    every = switches.all()
    yield _by("optimization_enabled", {switch.name: int(switch.effective) for switch in every})
    yield _by("optimization_requested", {switch.name: int(switch.requested) for switch in every})
    yield _by("optimization_reverts", switches.reverts)


class _Rows:
    def __init__(self) -> None:
        self._rows: dict[str, dict[tuple[str, ...], float]] = {}

    def add(self, counted: Counted, value: str, count: int) -> None:
        labels = {**dict(counted.fixed), **({counted.label: value} if counted.label else {})}
        key = tuple(labels[name] for name in FAMILIES[counted.family].labels)
        row = self._rows.setdefault(counted.family, {})
        row[key] = row.get(key, 0) + count

    def families(self) -> Iterator[Metric]:
        for name, row in self._rows.items():
            yield _family(name, dict(sorted(row.items())))


def _engine(load: EngineLoad) -> Iterator[Metric]:
    yield _by("engine_sequences", {"running": load.running, "waiting": load.waiting, "paused": load.paused})
    free = max(0, load.total_pages - load.used_pages - load.kept_pages)
    yield _by("engine_pages", {"used": load.used_pages, "kept": load.kept_pages, "free": free})
    yield _one("kv_cache_usage_ratio", load.used_pages / load.total_pages if load.total_pages else 0.0)
    device = {"used": load.device_used_bytes, "total": load.device_bytes} if load.device_bytes else {}
    yield _by("device_memory_bytes", device)
    yield _one("engine_steps", load.steps)
    yield _one("prompt_tokens", load.prompt_tokens)
    yield _one("prompt_cached_tokens", load.cached_tokens)
    yield _one("generated_tokens", load.generated_tokens)
    yield _one("draft_proposed_tokens", load.draft_proposed)
    yield _one("draft_accepted_tokens", load.draft_accepted)
    yield _one("preemptions", load.preemptions)


def _one(name: str, value: float | Histogram) -> Metric:
    return _family(name, {(): value})


def _by(name: str, values: Mapping[str, float] | Mapping[str, Histogram]) -> Metric:
    return _family(name, {(label,): value for label, value in values.items()})


def _family(name: str, rows: Rows) -> Metric:
    """Rows are by label values, in the order of the family's labels."""
    family = FAMILIES[name]
    metric: Any = _KINDS[family.kind](f"whippet_{name}", family.help, labels=family.labels)
    for labels, row in rows.items():
        if isinstance(row, Histogram):
            metric.add_metric(labels, list(row.cumulative()), row.total)
        else:
            metric.add_metric(labels, row)
    typed: Metric = metric
    return typed
