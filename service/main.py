"""The composition root: settings to a running server, signals, drain, and exit codes."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import uvloop

from engine.api import EngineState
from engine.client import EngineClient
from engine.errors import EngineError, InvalidModel, Unsupported
from service.config.settings import BadSettings, Settings
from service.config.sources import load
from service.core.admission import Admission
from service.core.answers.caches import AnswerCaches, checked
from service.core.answers.flush import Flusher
from service.core.answers.lookup import AnswerSources
from service.core.generation import Generator
from service.core.model import ServedModel
from service.core.switches import Switches
from service.core.text import Tokenizer
from service.observability.metrics import Metrics
from service.observability.progress import Progress
from service.observability.scrape import PATH as METRICS_PATH
from service.observability.scrape import MetricsPort
from service.protocols.seam import Services, UseCases, WireProtocol
from service.protocols.whippet_v1.services import GENERATION, WhippetV1
from service.transport.auth import OpenHouse, TokenFile
from service.transport.health import SERVICE as HEALTH
from service.transport.health import Health
from service.transport.ports import Port, PortTaken, credentials_of, open_port
from service.transport.rpc import Guard
from service.transport.writer import StallWatch

PROTOCOLS: tuple[WireProtocol, ...] = (WhippetV1(),)

# Exit codes
STOPPED = 0  # as asked, nothing was lost
CUT_OFF = 1  # requests were still live when the drain's time was over, or something broke
BAD_SETTINGS = 2
BAD_MODEL = 3
PORT_TAKEN = 4

_LAST_WORDS = 2.0  # seconds for statuses to leave once everything has ended
_log = logging.getLogger(__name__)


def serve(argv: Sequence[str]) -> int:
    """Serves until it is told to stop. Returns the exit code; what is wrong at the start is one line on stderr."""
    try:
        settings = load(argv)
        logging.basicConfig(
            level=settings.log_level.upper(),
            stream=sys.stderr,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        logging.getLogger("grpc._cython.cygrpc").addFilter(_not_about_departures)
        return uvloop.run(_serve(settings))
    except BadSettings as error:
        return _refuse(error, BAD_SETTINGS)
    except PortTaken as error:
        return _refuse(error, PORT_TAKEN)
    except (InvalidModel, Unsupported) as error:
        return _refuse(error, BAD_MODEL)
    except EngineError as error:
        return _refuse(error, CUT_OFF)


def _not_about_departures(record: logging.LogRecord) -> bool:
    """gRPC logs a traceback where a caller goes away at the very moment that its answer is sent."""
    return "ExecuteBatchError raised in core" not in record.getMessage()


def _refuse(error: Exception, code: int) -> int:
    sys.stderr.write(f"whippet: {' '.join(str(error).split())}\n")
    return code


@dataclass(frozen=True, slots=True)
class _House:
    """All that runs."""

    engine: EngineClient
    admission: Admission
    caches: AnswerCaches
    health: Health
    watch: StallWatch
    data: Port
    admin: Port
    probes: Port
    metrics: MetricsPort | None

    @property
    def ports(self) -> tuple[Port, ...]:
        return (self.data, self.admin, self.probes)


async def _serve(settings: Settings) -> int:
    stop = _Signals(asyncio.get_running_loop())
    house = _build(settings)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(house.caches.aclose)
        stack.push_async_callback(house.engine.close)
        for port in house.ports:
            await port.server.start()
            stack.push_async_callback(port.server.stop, None)
        if house.metrics is not None:
            stack.push_async_callback(house.metrics.stop)
            await house.metrics.start()
        background = [asyncio.create_task(house.health.run()), asyncio.create_task(house.watch.run())]
        for task in background:
            stack.callback(task.cancel)
        if not await stop.before(house.engine.start()):
            return STOPPED
        house.caches.now()
        gc.collect()
        gc.freeze()  # a full collection would otherwise look at every imported module, with all streams waiting
        house.health.refresh()
        _announce(settings, house)
        await stop.before(_first_to_end(background))
        return await _drain(settings.drain.timeout, house, stop)


def _build(settings: Settings) -> _House:
    """Everything, bound and not yet started."""
    credentials = credentials_of(settings.tls)
    tokens = settings.auth.tokens_file
    cache_options = checked(settings.cache)
    guard: Guard = OpenHouse() if tokens is None else TokenFile(tokens)
    tokenizer = Tokenizer.of_bytes() if settings.model is None else Tokenizer.load(settings.model)
    vocab_size = None if settings.model is None else tokenizer.vocab_size
    engine = EngineClient(
        settings.engine_settings(vocab_size), stream_buffer=settings.stream.buffer_bytes, on_progress=Progress()
    )

    def capacity() -> int:
        return settings.scheduler.max_sequences if engine.info is None else engine.info.max_sequences

    admission = Admission(settings.limits, capacity)
    health = Health(lambda: engine.state is EngineState.READY and not admission.draining)
    watch = StallWatch(settings.stream.stall_timeout)
    model = ServedModel(settings.served_name, tokenizer, engine)
    switches = Switches(settings.optimizations, engine)
    caches = AnswerCaches(cache_options, engine, tokenizer.digest)
    sources = AnswerSources(model, engine, caches, switches, admission.slots)
    cases = UseCases(
        engine=engine,
        model=model,
        generator=Generator(model, sources, admission),
        admission=admission,
        switches=switches,
        caches=caches,
        flusher=Flusher(caches, guard.tenants),
    )
    metrics = Metrics(engine, admission, caches, switches, settings.served_name)
    data = [protocol.data_services(cases, guard, watch) for protocol in PROTOCOLS]
    operators = [protocol.admin_services(cases, guard) for protocol in PROTOCOLS]

    def port(address: str, services: list[Services]) -> Port:
        handlers = [handler for one in services for handler in one.handlers]
        names = [name for one in services for name in one.names]
        return open_port(address, [*handlers, health.handlers()], [*names, HEALTH], credentials)

    return _House(
        engine=engine,
        admission=admission,
        caches=caches,
        health=health,
        watch=watch,
        data=port(settings.listen, data),
        admin=port(settings.admin_listen, operators),
        probes=open_port(settings.health_listen, [health.handlers()], (HEALTH,), None),
        metrics=MetricsPort(settings.metrics_listen, metrics.families) if settings.metrics_listen else None,
    )


def _announce(settings: Settings, house: _House) -> None:
    """Says on stdout what is served, where, and how to call it."""
    info = house.engine.info
    if info is not None:
        sys.stdout.write(
            f"serving {settings.served_name}: {info.architecture}, {info.weight_format} {info.dtype} on {info.device}, "
            f"decoder {info.decoder}, {info.max_sequences} sequences of up to {info.max_context} tokens\n"
        )
    if house.metrics is not None:
        sys.stdout.write(f"metrics: http://{house.metrics.address}{METRICS_PATH}\n")
    tls = "-plaintext" if settings.tls.cert is None else "-cacert CA.pem"
    token = "" if settings.auth.tokens_file is None else ' -H "authorization: Bearer $TOKEN"'
    sys.stdout.write(
        f'call it: grpcurl {tls}{token} -d \'{{"text": "def read_json(path):", "stopping": {{"max_tokens": 64}}}}\' '
        f"{house.data.address} {GENERATION}/GenerateStream\n"
        f"ready: data {house.data.address} admin {house.admin.address} health {house.probes.address}\n"
    )
    sys.stdout.flush()


async def _drain(within: float, house: _House, stop: _Signals) -> int:
    """Refuses what is new, waits for what is live, then lets go. A second signal cuts the wait short."""
    house.admission.drain()
    house.health.refresh()
    _log.info("draining: %d live requests", house.admission.live)
    await stop.before(house.admission.idle(within))
    cut = house.admission.live
    if cut:
        _log.warning("%d requests are cut off", cut)
    await house.engine.close()  # what is still live fails with UNAVAILABLE
    house.health.close()
    await asyncio.gather(*(port.server.stop(_LAST_WORDS) for port in house.ports))
    return CUT_OFF if cut else STOPPED


async def _first_to_end(tasks: list[asyncio.Task[None]]) -> None:
    """These never end by themselves: what ends one is raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


class _Signals:
    """SIGTERM and SIGINT."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._came = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._came.set)

    async def before(self, work: Coroutine[Any, Any, object]) -> bool:
        """Runs `work` until it is done or a signal comes. Whether it got done."""
        task = asyncio.ensure_future(work)
        signalled = asyncio.ensure_future(self._came.wait())
        try:
            await asyncio.wait((task, signalled), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
                return True
            self._came.clear()
            return False
        finally:
            for other in (task, signalled):
                other.cancel()
            await asyncio.gather(task, signalled, return_exceptions=True)
