"""Composes a server: from settings to its parts, bound and not yet started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources

import grpc

from engine.client import EngineClient, texts_digest
from engine.errors import InvalidModel
from engine.launch import Begun
from engine.settings import CPU_SEQUENCES
from service.config.settings import Settings
from service.core.admission.admission import Admission
from service.core.answers.caches import AnswerCaches, checked
from service.core.answers.flush import Flusher
from service.core.answers.lookup import AnswerSources
from service.core.generation import Generator
from service.core.model import ServedModel
from service.core.operations.draining import Drain
from service.core.operations.profiling import Profiler
from service.core.operations.reloading import Reloader
from service.core.parsing.formats import choose
from service.core.switches import OptimizationSwitches
from service.core.text import Tokenizer
from service.core.text.archive import TokenizerArchive
from service.core.text.sandbox.processes import TextProcesses
from service.core.tokenization import Tokenization
from service.observability.instruments import Instruments
from service.observability.metrics import Metrics
from service.observability.record import Observers
from service.observability.scrape import MetricsPort
from service.protocols.console.site import Console
from service.protocols.open_inference.services import OpenInference
from service.protocols.seam import Services, UseCases, WireProtocol
from service.protocols.vllm_engine.services import VllmEngine
from service.protocols.whippet_v1.services import WhippetV1
from service.tracing.start import Traces
from service.tracing.start import start as start_traces
from service.transport.call.http2 import PortBounds
from service.transport.call.inbox import SMALL, Inbox, InboxBounds
from service.transport.call.rpc import Guard, UnknownMethods
from service.transport.call.writer import StallWatch
from service.transport.identity.identity import Identity, closed_console
from service.transport.identity.tenants_file import quotas_of
from service.transport.port import reflection
from service.transport.port.evictor import Evictor
from service.transport.port.health import SERVICE as HEALTH
from service.transport.port.health import Health
from service.transport.ports import SIDE_BOUNDS, Port, open_port, open_shared_port
from service.transport.process.descriptors import divide
from service.transport.relays.relays import RelayCounts, RelayOptions


def protocols(settings: Settings) -> tuple[WireProtocol, ...]:
    enabled = settings.protocols
    others: tuple[tuple[bool, WireProtocol], ...] = (
        (enabled.vllm_engine, VllmEngine()),
        (enabled.open_inference, OpenInference()),
    )
    return WhippetV1(), *(protocol for on, protocol in others if on)


@dataclass(frozen=True, slots=True)
class ServerParts:
    identity: Identity
    reloader: Reloader
    engine: EngineClient
    model: ServedModel
    admission: Admission
    drain: Drain
    caches: AnswerCaches
    health: Health
    watch: StallWatch
    data: Port
    admin: Port
    probes: Port
    instruments: Instruments
    metrics: MetricsPort | None
    traces: Traces

    def reload(self) -> None:
        self.reloader.now()
        self.identity.reload()
        self.admission.quotas.reload()

    @property
    def ports(self) -> tuple[Port, ...]:
        return (self.data, self.admin, self.probes)


def build(
    settings: Settings,
    again: Callable[[], Settings],
    texts: str,
    processes: TextProcesses,
    refusals: Counter[str],
    begun: Begun,
) -> ServerParts:
    """Starts no part but the engine's first process, which was begun."""
    identity = Identity(settings)
    guard = identity.guard
    traces = start_traces(settings.traces, settings.served_name)
    instruments = Instruments(settings.log.tenants, traces.observers, traces.counts, traces.sample)
    spoken = protocols(settings)
    counted = frozenset[str]().union(*(protocol.counted for protocol in spoken))
    cases, engine = _use_cases(settings, texts, guard, processes, refusals, instruments, counted, begun)
    limits, observers = settings.limits, instruments.observers
    watch = StallWatch(settings.stream.stall_timeout)
    prompts = Inbox(InboxBounds(limits.message_bytes, limits.live_message_bytes), refusals)
    orders = Inbox(SMALL, refusals)
    data = [protocol.data_services(cases, guard, prompts, watch, observers) for protocol in spoken]
    operators = [protocol.admin_services(cases, guard, orders, observers) for protocol in spoken]
    health = Health(
        lambda: not cases.objection,
        lambda: engine.alive,
        [name for one in data for name in one.generating],
    )
    reloader = Reloader(settings, again, engine, cases.switches, cases.caches, instruments.reloads)
    metrics = Metrics(
        engine, cases.admission, cases.caches, cases.switches, settings.served_name, instruments, identity
    )
    most = divide(limits.connections)
    wide = PortBounds(
        most.connections, limits.connection_calls, limits.message_bytes, limits.connection_age, most.spare
    )
    narrow = replace(SIDE_BOUNDS, spare=most.spare)
    ports = _Ports(health, observers, identity)
    relays = RelayOptions(settings.server.fronts, settings.server.hang_timeout, settings.log_level, settings.log.format)
    return ServerParts(
        identity=identity,
        reloader=reloader,
        engine=engine,
        model=cases.model,
        admission=cases.admission,
        drain=cases.drain,
        caches=cases.caches,
        health=health,
        watch=watch,
        data=ports.open_data(settings.listen, data, prompts, wide, relays, RelayCounts(instruments.relays, refusals)),
        admin=ports.open("admin-listen", settings.admin_listen, operators, orders, narrow),
        probes=ports.open("health-listen", settings.health_listen, [], Inbox(SMALL, refusals), narrow),
        instruments=instruments,
        metrics=_metrics_port(settings, metrics, cases, identity, [*data[0].handlers, *operators[0].handlers]),
        traces=traces,
    )


def _metrics_port(
    settings: Settings,
    metrics: Metrics,
    cases: UseCases,
    identity: Identity,
    handlers: list[grpc.GenericRpcHandler[bytes, bytes]],
) -> MetricsPort | None:
    if not settings.metrics_listen:
        return None
    console = certificates = None
    if settings.console.enabled:
        certificates = identity.certificates
        hosts = [name.strip() for name in settings.console.hosts.split(",")]
        closed, secure = closed_console(settings), certificates is not None
        console = Console(cases, identity.guard, handlers, hosts, closed=closed, secure=secure)
    tls = None if certificates is None else certificates.context
    return MetricsPort("metrics-listen", settings.metrics_listen, metrics.families, console, tls)


class _Ports:
    """Opens ports that have health and reflection beside their services."""

    def __init__(self, health: Health, observers: Observers, identity: Identity) -> None:
        self._health = health
        self._observers = observers
        self._identity = identity
        self._evictor = Evictor()
        self._contract = resources.files("service.pb").joinpath("descriptors.binpb").read_bytes()

    def open(self, setting: str, address: str, services: list[Services], inbox: Inbox, bounds: PortBounds) -> Port:
        """A port without services is for probes, and uses no TLS."""
        credentials = self._identity.credentials() if services else None
        port = open_port(setting, address, self._handlers(services, inbox), credentials, bounds)
        self._evictor.watch(port.number, bounds, inbox.busy)
        self._evictor.start()
        return port

    def open_data(
        self,
        address: str,
        services: list[Services],
        inbox: Inbox,
        bounds: PortBounds,
        relays: RelayOptions,
        counts: RelayCounts,
    ) -> Port:
        if relays.count == 1:
            return self.open("listen", address, services, inbox, bounds)
        handlers, certificates = self._handlers(services, inbox), self._identity.certificates
        return open_shared_port("listen", address, handlers, certificates, bounds, relays, counts)

    def _handlers(self, services: list[Services], inbox: Inbox) -> list[grpc.GenericRpcHandler[bytes, bytes]]:
        names = [name for one in services for name in one.names]
        handlers = [handler for one in services for handler in one.handlers]
        handlers.append(self._health.handlers(inbox, self._observers))
        handlers += reflection.handlers([*names, HEALTH], self._contract, inbox, self._observers)
        return [*handlers, UnknownMethods(inbox, self._observers)]


def _tokenizer(settings: Settings) -> Tokenizer:
    if settings.model is None:
        return Tokenizer.of_bytes()
    return Tokenizer.load(settings.model, only_plain=True, template=settings.chat_template)


def _use_cases(
    settings: Settings,
    texts: str,
    guard: Guard,
    processes: TextProcesses,
    refusals: Counter[str],
    instruments: Instruments,
    counted: frozenset[str],
    begun: Begun,
) -> tuple[UseCases, EngineClient]:
    cache_options = checked(settings.cache)
    tokenizer = _tokenizer(settings)
    if tokenizer.digest != processes.digest:
        raise InvalidModel(f"{settings.model}: has changed while it was read; start the server again")
    vocab_size = None if settings.model is None else tokenizer.vocab_size
    engine = EngineClient(
        settings.engine_settings(vocab_size),
        texts=texts,
        stream_buffer=settings.stream.buffer_bytes,
        on_progress=instruments.progress,
        begun=begun,
    )

    def capacity() -> int:
        known = engine.info  # before it is there, what was asked for or a CPU's share
        most = settings.scheduler.max_sequences or CPU_SEQUENCES if known is None else known.max_sequences
        return min(most, engine.load.most_running or most)

    caches = AnswerCaches(cache_options, engine, tokenizer.digest, wanted_mode=settings.cache.semantic.mode)
    quotas = quotas_of(settings.auth.tenants_file, caches, refusals)
    admission = Admission(settings.limits, capacity, refusals=refusals, quotas=quotas)
    model = ServedModel(settings.served_name, tokenizer, engine, processes, choose(settings.chat, tokenizer))
    switches = OptimizationSwitches(settings.optimizations, engine, caches.unused)
    sources = AnswerSources(model, engine, caches, switches, admission.slots)
    cases = UseCases(
        engine=engine,
        model=model,
        processes=processes,
        generator=Generator(model, sources, admission),
        tokenization=Tokenization(model, admission),
        tokenizer_files=TokenizerArchive(
            settings.model, lambda: texts == texts_digest(settings.model or ""), settings.chat_template
        ),
        admission=admission,
        drain=Drain(admission, settings.drain.delay),
        switches=switches,
        caches=caches,
        flusher=Flusher(caches, guard.tenants),
        profiler=Profiler(engine),
        instruments=instruments,
        counted=counted,
    )
    return cases, engine
