"""Proofs for traces."""

from __future__ import annotations

from service.config.settings import BadSettings, Settings
from service.observability.record import Observers
from service.tracing.start import start
from tests.service.config.proofs import FAKE, Proof, Tools, becomes

SECURE = (*FAKE, "--traces.endpoint=https://127.0.0.1:1")
COLLECTOR = (*FAKE, "--traces.endpoint=http://127.0.0.1:1")


async def waiting(settings: Settings, tools: Tools) -> int | None:
    """How many of a thousand calls wait to be sent; None where traces are off."""
    traces = start(settings.traces, "m")
    observers = Observers(traces.observers, sample=traces.sample)
    for _ in range(1000):
        observers.end(observers.begin("whippet.v1.ModelService/ListModels", ()), "OK")
    await traces.close()
    return sum(traces.counts.values()) if traces.observers else None


def some(before: object, after: object) -> bool:
    return before is None and isinstance(after, int)


async def refused(settings: Settings, tools: Tools) -> bool:
    """Whether the authority's file is looked for."""
    try:
        await start(settings.traces, "m").close()
    except BadSettings:
        return True
    return False


PROOFS = {
    "traces.ca-file": Proof("{folder}/no.pem", refused, becomes(False, True), SECURE),
    "traces.endpoint": Proof("https://127.0.0.1:1", waiting, some),
    "traces.sample": Proof("0", waiting, lambda before, after: before > after == 0, COLLECTOR),
}
