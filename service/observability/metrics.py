"""Metrics for Prometheus, read at each scrape from counters that exist anyhow; names stand in `metric_names`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from cache.api import BORDERS, Mode
from engine.api import Engine, EngineLoad, EngineState
from service.core.admission import Admission
from service.core.answers.caches import AnswerCaches
from service.core.switches import Switches
from service.observability.metric_names import EVENTS, FAMILIES, TIMES, Counted, Labels
from service.version import version

Counts = Mapping[tuple[str, str], int]  # (event, label) → count


# What a verdict of the semantic cache meant for the request; in shadow nothing is served.
_OUTCOMES = {"empty": "miss", "vetoed": "miss", "unproven": "miss"}
_FOUND = ("strict", "learned")
_BREAKERS = {"closed": 0, "probing": 1, "open": 2}


class Metrics:
    """Reads counters on the event loop that changes them."""

    def __init__(
        self, engine: Engine, admission: Admission, caches: AnswerCaches, switches: Switches, model_name: str
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._caches = caches
        self._switches = switches
        self._model_name = model_name
        self._version = version()  # read from a file

    def families(self) -> list[Metric]:
        """All families, as of now."""
        load = self._engine.load
        return [*self._process(), *_engine(load), *self._requests(), *self._counted(load), *self._cached()]

    def _process(self) -> Iterator[Metric]:
        engine, info = self._engine, self._engine.info
        yield _gauge("build_info", "The version that runs.", {self._version: 1}, "version")
        if info is not None:
            facts = ("architecture", "weight_format", "dtype", "device", "decoder")
            model = GaugeMetricFamily("whippet_model_info", "The model and how it is run.", labels=("model", *facts))
            model.add_metric((self._model_name, *(str(getattr(info, fact)) for fact in facts)), 1)
            yield model
        states = {state.value: int(state is engine.state) for state in EngineState}
        yield _gauge("engine_state", "1 for the state that the engine is in.", states, "state")
        yield _counter("engine_restarts", "Times that the engine was started again.", engine.restarts)
        yield from _optimizations(self._switches)

    def _requests(self) -> Iterator[Metric]:
        admission = self._admission
        yield _gauge("requests_live", "Requests that have not ended.", {"": admission.live})
        yield _gauge(
            "requests_looking", "Of those, whose answer may yet be found in a cache.", {"": admission.in_lookup}
        )
        slots = admission.slots
        waiting = {"running": slots.taken - slots.waiting, "waiting": slots.waiting}
        yield _gauge("generations", "Generations with their first token, and those that wait for it.", waiting, "state")
        yield _gauge("draining", "Whether nothing new is let in.", {"": int(admission.draining)})

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
        """The semantic cache's lookups as hits and misses."""
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
        times = self._caches.times()
        histogram = HistogramMetricFamily("whippet_cache_lookup_seconds", "How long lookups took.", labels=("cache",))
        for event, cache in TIMES.items():
            if event in times:
                took = times[event]
                borders = (*map(str, BORDERS), "+Inf")
                buckets = list(zip(borders, accumulate(took.buckets), strict=True))
                histogram.add_metric((cache,), buckets, took.total)
        yield histogram
        breakers = {pool: _BREAKERS[state] for pool, state in self._caches.breakers().items()}
        yield _gauge(
            "cache_breaker_state", "Whether Redis is asked: 0 it is, 1 once to see, 2 it is not.", breakers, "pool"
        )
        yield _gauge("cache_bytes", "Bytes that a store holds in this process.", self._caches.held(), "store")


def _optimizations(switches: Switches) -> Iterator[Metric]:
    every = switches.all()
    effective = {switch.name: int(switch.effective) for switch in every}
    yield _gauge("optimization_enabled", "Whether a switch is on and does something.", effective, "name")
    requested = {switch.name: int(switch.requested) for switch in every}
    yield _gauge("optimization_requested", "Whether a switch is to be on.", requested, "name")
    text = "Times that a switch was turned back, because steps failed soon after it was set."
    reverts = CounterMetricFamily("whippet_optimization_reverts", text, labels=("name",))
    for name, count in switches.reverts.items():
        reverts.add_metric((name,), count)
    yield reverts


class _Rows:
    """Counts by family and labels."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[Labels, int]] = {}

    def add(self, counted: Counted, value: str, count: int) -> None:
        """Counts under equal labels add up."""
        labels = {**dict(counted.fixed), **({counted.label: value} if counted.label else {})}
        key = tuple((name, labels[name]) for name in FAMILIES[counted.family].labels)
        row = self._rows.setdefault(counted.family, {})
        row[key] = row.get(key, 0) + count

    def families(self) -> Iterator[Metric]:
        """Those with at least one row."""
        for name, row in self._rows.items():
            family = CounterMetricFamily(f"whippet_{name}", FAMILIES[name].help, labels=FAMILIES[name].labels)
            for labels, count in sorted(row.items()):
                family.add_metric([value for _, value in labels], count)
            yield family


def _engine(load: EngineLoad) -> Iterator[Metric]:
    sequences = {"running": load.running, "waiting": load.waiting, "paused": load.paused}
    yield _gauge("engine_sequences", "Sequences in the engine.", sequences, "state")
    free = max(0, load.total_pages - load.used_pages - load.kept_pages)
    pages = {"used": load.used_pages, "kept": load.kept_pages, "free": free}
    text = "Key-value pages: that sequences need, that are kept for prompts to come, and free ones."
    yield _gauge("engine_pages", text, pages, "state")
    yield _counter("engine_steps", "Steps.", load.steps)
    yield _counter("prompt_tokens", "Prompt tokens of sequences that have begun.", load.prompt_tokens)
    yield _counter("prompt_cached_tokens", "Of those, whose keys and values were there.", load.cached_tokens)
    yield _counter("generated_tokens", "Tokens generated.", load.generated_tokens)
    yield _counter("preemptions", "Times that a sequence was put back for want of pages.", load.preemptions)


def _gauge(name: str, text: str, values: Mapping[str, float], label: str = "") -> Metric:
    """One value for each of the label's, or the one under no label."""
    family = GaugeMetricFamily(f"whippet_{name}", text, labels=(label,) if label else ())
    for of, value in values.items():
        family.add_metric((of,) if label else (), value)
    return family


def _counter(name: str, text: str, value: int) -> Metric:
    family = CounterMetricFamily(f"whippet_{name}", text)
    family.add_metric((), value)
    return family
