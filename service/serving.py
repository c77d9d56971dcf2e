"""Runs a server from its settings to its end: start, signals, drain."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack

import uvloop

from engine.client import texts_digest
from engine.launch import Begun
from service.assembly import ServerParts, build
from service.config.settings import Settings
from service.core.text.sandbox.processes import TextProcesses
from service.observability.scrape import PATH as METRICS_PATH
from service.protocols.whippet_v1.rights import GENERATION
from service.signals import Signals
from service.transport.identity.identity import closed_console, refuse_strangers
from service.transport.process.garbage import Garbage
from service.transport.process.heap import Heap
from service.transport.process.silence import silence

# Exit codes
STOPPED = 0  # by a signal, no request was lost
CUT_OFF = 1  # requests were still live when the drain's time was over, or something broke

# What the line that says how to call the server asks a model with a chat template, and one without.
_QUESTION = '{"chat": {"messages": [{"role": "user", "content": "What is the capital of France?"}]}}'
_BEGINNING = '{"text": "Once upon a time", "stopping": {"max_tokens": 64}}'
_STATUS_GRACE = 1.0  # seconds for statuses to leave once everything has ended
_log = logging.getLogger(__name__)


def run(settings: Settings, again: Callable[[], Settings], begun: Begun) -> int:
    """Returns the exit code. Raises BadSettings, PortTaken and EngineError."""
    refuse_strangers(settings)
    silence()
    return uvloop.run(_serve(settings, again, begun))


async def _serve(settings: Settings, again: Callable[[], Settings], begun: Begun) -> int:
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(Signals(asyncio.get_running_loop()))
        refusals = Counter[str]()
        processes = TextProcesses(settings.model, refusals=refusals, template=settings.chat_template)
        stack.push_async_callback(processes.close)
        if not await stop.before(processes.start()):  # reads the tokenizer first, under limits
            return STOPPED
        texts = texts_digest(settings.model or "")  # before they are read here
        parts = build(settings, again, texts, processes, refusals, begun)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, parts.reload)
        stack.push_async_callback(parts.traces.close)
        stack.push_async_callback(parts.caches.aclose)
        stack.push_async_callback(parts.admission.quotas.aclose)
        stack.push_async_callback(parts.engine.close)
        for port in parts.ports:
            stack.push_async_callback(port.server.stop, None)
            if not await stop.before(port.server.start()):
                return STOPPED
        if parts.metrics is not None:
            stack.push_async_callback(parts.metrics.stop)
            await parts.metrics.start()
        try:
            within = settings.drain.timeout if await _ready(settings, parts, stop, stack) else None
        except Exception:
            await _drain(None, parts, stop)  # callers learn of it
            raise
        return await _drain(within, parts, stop)


async def _ready(settings: Settings, parts: ServerParts, stop: Signals, stack: AsyncExitStack) -> bool:
    """False where a signal came before the engine was ready."""
    if not await stop.before(parts.engine.start()):
        return False
    instruments = parts.instruments
    parts.caches.now()
    garbage = Garbage().run(lambda: parts.admission.live)  # all that was loaded is there by now
    works = (parts.reloader.run(), instruments.lag.run(), parts.health.run(), parts.watch.run(), Heap().run(), garbage)
    background = [asyncio.create_task(work) for work in (*works, parts.engine.ended())]
    for task in background:
        stack.callback(task.cancel)
    parts.health.refresh()
    _announce(settings, parts)
    await stop.before(_first_to_end(background))
    return True


def _announce(settings: Settings, parts: ServerParts) -> None:
    info = parts.engine.info
    if info is None:
        return
    tls = "-plaintext" if settings.tls.cert is None else "-cacert CA.pem"
    token = "" if settings.auth.tokens_file is None else ' -H "authorization: Bearer $TOKEN"'
    metrics = "" if parts.metrics is None else f" metrics http://{parts.metrics.address}{METRICS_PATH}"
    if parts.metrics is not None and settings.console.enabled and not closed_console(settings):
        scheme = "http" if settings.tls.cert is None else "https"
        metrics = f" console {scheme}://{parts.metrics.address}/{metrics}"
    sys.stdout.write(
        f"serving {settings.served_name}: {info.architecture}, {info.weight_format} {info.dtype} on {info.device}, "
        f"decoder {info.decoder}, {info.max_sequences} sequences of up to {info.max_context} tokens\n"
        f"call it: grpcurl {tls}{token} -d '{_QUESTION if parts.model.chat else _BEGINNING}' "
        f"{parts.data.address} {GENERATION}/Generate\n"
        f"ready: data {parts.data.address} admin {parts.admin.address} health {parts.probes.address}{metrics}\n"
    )
    sys.stdout.flush()


async def _drain(within: float | None, parts: ServerParts, stop: Signals) -> int:
    """Drains before closing, without waiting where `within` is None. A second signal ends all waiting."""
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


async def _close(parts: ServerParts) -> None:
    """Fails live requests with UNAVAILABLE, and closes every port."""
    parts.health.close()
    await asyncio.gather(parts.engine.close(), *(port.close(_STATUS_GRACE) for port in parts.ports))


async def _first_to_end(tasks: list[asyncio.Task[None]]) -> None:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
