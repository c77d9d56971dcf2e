"""The composition root: settings to a running server, signals, drain, and exit codes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import uvloop

from engine.api import EngineState
from engine.client import EngineClient, texts_digest
from engine.errors import EngineError, InvalidModel, Unsupported
from engine.settings import CPU_SEQUENCES
from service.config.settings import BadSettings, Settings
from service.config.sources import load
from service.core.admission import Admission
from service.core.answers.caches import AnswerCaches, checked
from service.core.answers.flush import Flusher
from service.core.answers.lookup import AnswerSources
from service.core.cache_dir import UnsafeFolder, cache_dir
from service.core.draining import Drain
from service.core.generation import Generator
from service.core.model import ServedModel
from service.core.profiling import Profiler
from service.core.reloading import Reloader
from service.core.switches import Switches
from service.core.text import Tokenizer
from service.core.text.processes import TextProcesses
from service.core.tokenization import Tokenization
from service.observability import logs
from service.observability.instruments import Instruments
from service.observability.metrics import Metrics
from service.observability.scrape import PATH as METRICS_PATH
from service.observability.scrape import MetricsPort
from service.protocols.seam import Services, UseCases, WireProtocol
from service.protocols.whippet_v1.rights import GENERATION
from service.protocols.whippet_v1.services import WhippetV1
from service.signals import Signals
from service.tracing.start import Traces
from service.tracing.start import start as start_traces
from service.transport import reflection
from service.transport.descriptors import connections
from service.transport.health import SERVICE as HEALTH
from service.transport.health import Health
from service.transport.heap import Heap
from service.transport.identity import Identity, refuse_strangers
from service.transport.inbox import SMALL, Inbox, InboxBounds
from service.transport.ports import SIDE_BOUNDS, Port, PortBounds, PortTaken, open_port
from service.transport.rpc import Guard, Strangers
from service.transport.silence import silence
from service.transport.tenants_file import quotas_of
from service.transport.writer import StallWatch

PROTOCOLS: tuple[WireProtocol, ...] = (WhippetV1(),)

# Exit codes
STOPPED = 0  # by a signal, no request was lost
CUT_OFF = 1  # requests were still live when the drain's time was over, or something broke
BAD_SETTINGS = 2
BAD_MODEL = 3
PORT_TAKEN = 4

_STATUS_GRACE = 1.0  # seconds for statuses to leave once everything has ended
_log = logging.getLogger(__name__)


def serve(argv: Sequence[str]) -> int:
    """Serves until a signal comes. Returns the exit code; an error at the start is one line on stderr."""
    try:
        settings = load(argv)
        refuse_strangers(settings)
        logs.set_up(settings.log_level, settings.log.format)
        silence()
        return uvloop.run(_serve(settings, partial(load, argv, dict(os.environ))))
    except (BadSettings, UnsafeFolder) as error:
        return _refuse(error, BAD_SETTINGS)
    except PortTaken as error:
        return _refuse(error, PORT_TAKEN)
    except (InvalidModel, Unsupported) as error:
        return _refuse(error, BAD_MODEL)
    except EngineError as error:
        return _refuse(error, CUT_OFF)


def _refuse(error: Exception, code: int) -> int:
    logs.last_line(" ".join(str(error).split()))
    return code


@dataclass(frozen=True, slots=True)
class _Parts:
    """What starts and stops with the server."""

    identity: Identity
    reloader: Reloader
    engine: EngineClient
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
        """Reads again, soon, what files say of callers, of ourselves and of the settings."""
        self.reloader.now()
        self.identity.reload()
        self.admission.quotas.reload()

    @property
    def ports(self) -> tuple[Port, ...]:
        return (self.data, self.admin, self.probes)


async def _serve(settings: Settings, again: Callable[[], Settings]) -> int:
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(Signals(asyncio.get_running_loop()))
        stack.enter_context(cache_dir(settings.cache_dir, os.environ))
        refusals = Counter[str]()
        processes = TextProcesses(settings.model, refusals=refusals)
        stack.push_async_callback(processes.close)
        if not await stop.before(processes.start()):  # reads the tokenizer first, under limits
            return STOPPED
        texts = texts_digest(settings.model or "")  # before they are read here
        parts = _build(settings, again, texts, processes, refusals)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, parts.reload)
        stack.push_async_callback(parts.traces.close)
        stack.push_async_callback(parts.caches.aclose)
        stack.push_async_callback(parts.admission.quotas.aclose)
        stack.push_async_callback(parts.engine.close)
        for port in parts.ports:
            await port.server.start()
            stack.push_async_callback(port.server.stop, None)
        if parts.metrics is not None:
            stack.push_async_callback(parts.metrics.stop)
            await parts.metrics.start()
        try:
            within = settings.drain.timeout if await _ready(settings, parts, stop, stack) else None
        except Exception:
            await _drain(None, parts, stop)  # who calls is told
            raise
        return await _drain(within, parts, stop)


async def _ready(settings: Settings, parts: _Parts, stop: Signals, stack: AsyncExitStack) -> bool:
    """Serves, from the engine's start to a signal. False where that came before the engine was ready."""
    if not await stop.before(parts.engine.start()):
        return False
    instruments = parts.instruments
    works = (parts.reloader.run(), instruments.lag.run(), parts.health.run(), parts.watch.run(), Heap().run())
    background = [asyncio.create_task(work) for work in (*works, parts.engine.ended())]
    for task in background:
        stack.callback(task.cancel)
    parts.caches.now()
    gc.collect()
    gc.freeze()  # a full collection would otherwise visit every imported module, with all streams waiting
    parts.health.refresh()
    _announce(settings, parts)
    await stop.before(_first_to_end(background))
    return True


def _build(
    settings: Settings, again: Callable[[], Settings], texts: str, processes: TextProcesses, refusals: Counter[str]
) -> _Parts:
    """Everything, bound and not yet started."""
    identity = Identity(settings)
    guard = identity.guard
    traces = start_traces(settings.traces, settings.served_name)
    instruments = Instruments(settings.log.tenants, traces.observers, traces.counts, traces.sample)
    cases, engine = _use_cases(settings, texts, guard, processes, refusals, instruments)
    health = Health(lambda: engine.state is EngineState.READY and not cases.drain.begun, lambda: engine.alive)
    observers = instruments.observers
    watch = StallWatch(settings.stream.stall_timeout)
    reloader = Reloader(settings, again, engine, cases.switches, cases.caches, instruments.reloads)
    metrics = Metrics(
        engine, cases.admission, cases.caches, cases.switches, settings.served_name, instruments, identity
    )
    limits = settings.limits
    wide = PortBounds(
        connections(limits.connections), limits.connection_calls, limits.message_bytes, limits.connection_age
    )
    prompts = Inbox(InboxBounds(limits.message_bytes, limits.live_message_bytes), refusals)
    orders = Inbox(SMALL, refusals)
    data = [protocol.data_services(cases, guard, prompts, watch, observers) for protocol in PROTOCOLS]
    operators = [protocol.admin_services(cases, guard, orders, observers) for protocol in PROTOCOLS]

    def port(setting: str, address: str, services: list[Services], inbox: Inbox, bounds: PortBounds) -> Port:
        """With health and reflection beside the services."""
        names = [name for one in services for name in one.names]
        handlers = [handler for one in services for handler in one.handlers]
        handlers += [health.handlers(inbox, observers), reflection.handlers([*names, HEALTH], inbox, observers)]
        handlers.append(Strangers(observers))
        return open_port(setting, address, handlers, identity.credentials() if services else None, bounds)

    return _Parts(
        identity=identity,
        reloader=reloader,
        engine=engine,
        admission=cases.admission,
        drain=cases.drain,
        caches=cases.caches,
        health=health,
        watch=watch,
        data=port("listen", settings.listen, data, prompts, wide),
        admin=port("admin-listen", settings.admin_listen, operators, orders, SIDE_BOUNDS),
        probes=port("health-listen", settings.health_listen, [], Inbox(SMALL, refusals), SIDE_BOUNDS),
        instruments=instruments,
        metrics=MetricsPort("metrics-listen", settings.metrics_listen, metrics.families)
        if settings.metrics_listen
        else None,
        traces=traces,
    )


def _use_cases(
    settings: Settings,
    texts: str,
    guard: Guard,
    processes: TextProcesses,
    refusals: Counter[str],
    instruments: Instruments,
) -> tuple[UseCases, EngineClient]:
    """What protocols call, around an engine that is not started yet."""
    cache_options = checked(settings.cache)
    tokenizer = Tokenizer.of_bytes() if settings.model is None else Tokenizer.load(settings.model, only_plain=True)
    if tokenizer.digest != processes.digest:
        raise InvalidModel(f"{settings.model}: has changed while it was read; start the server again")
    vocab_size = None if settings.model is None else tokenizer.vocab_size
    engine = EngineClient(
        settings.engine_settings(vocab_size),
        texts=texts,
        stream_buffer=settings.stream.buffer_bytes,
        on_progress=instruments.progress,
    )

    def capacity() -> int:
        known = engine.info  # before it is there, what was asked for or a CPU's share
        return settings.scheduler.max_sequences or CPU_SEQUENCES if known is None else known.max_sequences

    caches = AnswerCaches(cache_options, engine, tokenizer.digest, wished=settings.cache.semantic.mode)
    quotas = quotas_of(settings.auth.tenants_file, caches, refusals)
    admission = Admission(settings.limits, capacity, refusals=refusals, quotas=quotas)
    model = ServedModel(settings.served_name, tokenizer, engine, processes)
    switches = Switches(settings.optimizations, engine, caches.unused)
    sources = AnswerSources(model, engine, caches, switches, admission.slots)
    cases = UseCases(
        engine=engine,
        model=model,
        processes=processes,
        generator=Generator(model, sources, admission),
        tokenization=Tokenization(model, admission),
        admission=admission,
        drain=Drain(admission, settings.drain.delay),
        switches=switches,
        caches=caches,
        flusher=Flusher(caches, guard.tenants),
        profiler=Profiler(engine),
        instruments=instruments,
    )
    return cases, engine


def _announce(settings: Settings, parts: _Parts) -> None:
    """Prints what is served, where, and how to call it."""
    info = parts.engine.info
    if info is not None:
        sys.stdout.write(
            f"serving {settings.served_name}: {info.architecture}, {info.weight_format} {info.dtype} on {info.device}, "
            f"decoder {info.decoder}, {info.max_sequences} sequences of up to {info.max_context} tokens\n"
        )
    if parts.metrics is not None:
        sys.stdout.write(f"metrics: http://{parts.metrics.address}{METRICS_PATH}\n")
    tls = "-plaintext" if settings.tls.cert is None else "-cacert CA.pem"
    token = "" if settings.auth.tokens_file is None else ' -H "authorization: Bearer $TOKEN"'
    sys.stdout.write(
        f'call it: grpcurl {tls}{token} -d \'{{"text": "def read_json(path):", "stopping": {{"max_tokens": 64}}}}\' '
        f"{parts.data.address} {GENERATION}/GenerateStream\n"
        f"ready: data {parts.data.address} admin {parts.admin.address} health {parts.probes.address}\n"
    )
    sys.stdout.flush()


async def _drain(within: float | None, parts: _Parts, stop: Signals) -> int:
    """Refuses new requests, waits for live ones, then closes; without waiting where `within` is None, since nothing was
    served yet, or cannot be any more. A second signal ends all waiting."""
    parts.drain.begin(for_good=True)
    parts.health.refresh()
    _log.info("draining: %d live requests", parts.admission.live)
    hurried = within is not None and not await stop.before(parts.drain.refused())
    parts.drain.refuse()
    parts.data.leave()
    if within is not None and not hurried:
        hurried = not await stop.before(parts.admission.idle(within))
    cut = parts.admission.live
    if cut:
        _log.warning("%d requests are cut off", cut)
    closing = asyncio.ensure_future(_close(parts))
    while hurried or not await stop.before(asyncio.shield(closing)):
        hurried = False
        parts.engine.kill()
        for port in parts.ports:
            port.gate.hurry()
    return CUT_OFF if cut else STOPPED


async def _close(parts: _Parts) -> None:
    """What is still live fails with UNAVAILABLE, and every port is closed."""
    parts.health.close()
    await asyncio.gather(parts.engine.close(), *(port.close(_STATUS_GRACE) for port in parts.ports))


async def _first_to_end(tasks: list[asyncio.Task[None]]) -> None:
    """These tasks never end by themselves: raises the error that ended one."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
