"""Drops cached answers at an operator's request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cache.api import EntryKind, StoreFault
from cache.open.caches import Caches
from engine.errors import EngineUnavailable
from service.core.answers.caches import AnswerCaches
from service.core.errors import CacheUnavailable

ANSWERS = (EntryKind.RESPONSE, EntryKind.SEMANTIC)
_RETRY = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class Flush:
    tenant: str  # empty: everybody's
    kinds: tuple[EntryKind, ...]  # empty: all that belongs to a tenant
    entry_id: str  # empty: all


class Flusher:
    def __init__(self, caches: AnswerCaches, tenants: Callable[[], Iterable[str]]) -> None:
        self._caches = caches
        self._tenants = tenants

    async def flush(self, what: Flush) -> int:
        """Returns the number dropped. Some may be left after CacheUnavailable."""
        caches = self._caches.now()
        if caches is None:
            raise EngineUnavailable("the engine is loading", _RETRY)
        tenants = (what.tenant,) if what.tenant else tuple(self._tenants())
        try:
            return sum([await _flush(caches, tenant, what) for tenant in tenants])
        except StoreFault:
            raise CacheUnavailable("the caches' store does not answer", _RETRY) from None


async def _flush(caches: Caches, tenant: str, what: Flush) -> int:
    entries = await caches.flush(tenant, what.kinds or ANSWERS, what.entry_id)
    if not what.kinds and not what.entry_id:
        # What is being written at the moment, what another model answered, and keys and values of prompts go with it.
        await caches.flush_tenant(tenant)
    return entries
