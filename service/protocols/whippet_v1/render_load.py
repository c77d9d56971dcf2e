"""Renders the server's load as a message."""

from __future__ import annotations

import resource
import time
from pathlib import Path

from engine.api import EngineState, ModelInfo
from engine.settings import PAGE_SIZE
from service.observability.histogram import Histogram
from service.pb.whippet.v1 import admin_pb2
from service.protocols.seam import UseCases
from service.protocols.whippet_v1.render import put_duration
from service.version import version

_STATES = {
    EngineState.LOADING: admin_pb2.ENGINE_STATE_LOADING,
    EngineState.READY: admin_pb2.ENGINE_STATE_READY,
    EngineState.RESTARTING: admin_pb2.ENGINE_STATE_RESTARTING,
    EngineState.STOPPED: admin_pb2.ENGINE_STATE_STOPPED,
}


def load(cases: UseCases) -> admin_pb2.GetLoadResponse:
    response = _engine(cases)
    admission, slots = cases.admission, cases.admission.slots
    response.cache_counts.update(cases.caches.named_counts())
    response.cache_breakers.update(cases.caches.breakers() | admission.quotas.breakers)
    response.live_requests = admission.live
    response.looking_requests = admission.in_lookup
    response.queued_requests = slots.waiting
    response.queue_limit = slots.total - slots.capacity
    response.max_sequences = slots.capacity
    response.ended_calls.update(cases.instruments.calls.ended(cases.counted))
    response.refused_requests.update(slots.refusals)
    for name, histogram in cases.instruments.calls.seconds().items():
        response.seconds[name].CopyFrom(_distribution(histogram))
    response.seconds["event_loop"].CopyFrom(_distribution(cases.instruments.lag.seconds))
    response.version = version()
    put_duration(response.uptime, time.monotonic() - cases.instruments.started_at)
    response.front_bytes = _resident()
    used = resource.getrusage(resource.RUSAGE_SELF)
    put_duration(response.front_cpu, used.ru_utime + used.ru_stime)
    return response


def _engine(cases: UseCases) -> admin_pb2.GetLoadResponse:
    engine = cases.engine
    now, info = engine.load, engine.info
    state = _STATES[engine.state]
    if cases.admission.draining and engine.state is EngineState.READY:
        state = admin_pb2.ENGINE_STATE_DRAINING
    return admin_pb2.GetLoadResponse(
        state=state,
        running=now.running,
        waiting=now.waiting,
        paused=now.paused,
        used_pages=now.used_pages,
        kept_pages=now.kept_pages,
        total_pages=now.total_pages if info is None else info.total_pages,
        page_size=PAGE_SIZE,
        device_used_bytes=now.device_used_bytes,
        device_bytes=now.device_bytes,
        steps=now.steps,
        prompt_tokens=now.prompt_tokens,
        cached_tokens=now.cached_tokens,
        generated_tokens=now.generated_tokens,
        draft_proposed=now.draft_proposed,
        draft_accepted=now.draft_accepted,
        preemptions=now.preemptions,
        restarts=engine.restarts,
        model=cases.model.name,
        runs_on="" if info is None else _runs_on(info),
    )


def _runs_on(info: ModelInfo) -> str:
    return f"{info.architecture}, {info.weight_format} {info.dtype} on {info.device}, decoder {info.decoder}"


def _distribution(histogram: Histogram) -> admin_pb2.Distribution:
    return admin_pb2.Distribution(borders=histogram.borders, counts=histogram.counts, total=histogram.total)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
