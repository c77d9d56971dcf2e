"""Opens all caches of a front process from settings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial

from cache.answers.cross_process import CrossProcess
from cache.answers.exact import ExactCache
from cache.answers.lease import Leases
from cache.answers.single_flight import SingleFlight
from cache.api import (
    Allowance,
    AnswerPart,
    BreakerState,
    CacheKey,
    CacheSettings,
    Counter,
    EntryKind,
    Generate,
    Mode,
    ModelIdentity,
    Question,
    RedisSettings,
    SemanticCache,
    SingleFlightSettings,
    Store,
    StoreFault,
)
from cache.seal.context import CacheContext
from cache.seal.envelope import OVERHEAD, Envelope
from cache.seal.keyring import open_keyring
from cache.seal.partition import PREFIXES, Epochs, Partitions
from cache.semantic.embedder import open_embedder
from cache.semantic.export import ExportFailed
from cache.semantic.exporter import Exporter
from cache.semantic.search import SimilarCache
from cache.store.memory import MemoryStore
from cache.store.redis_link import RedisLink
from cache.store.redis_store import RedisStore

log = logging.getLogger(__name__)

MEMORY_BUDGET = 0.020  # seconds; the memory store answers at once
BATCH = 500  # names deleted at a time


@dataclass(frozen=True, slots=True)
class _Shared:
    cross_process: CrossProcess
    link: RedisLink


class Caches:
    def __init__(self, settings: CacheSettings, context: CacheContext, shared: _Shared | None) -> None:
        self._settings = settings
        self._context = context
        self._shared = shared
        self._single_flight = SingleFlight(context.counter)
        self._semantic: SimilarCache | None = None
        self._loading: asyncio.Task[None] | None = None
        self._failed = ""  # why the embedder could not be loaded
        self._prefixes = Epochs(context.store, context.partitions, PREFIXES)
        self.responses = ExactCache(context, settings.response)

    @property
    def semantic(self) -> SemanticCache | None:
        """None where it is off, or while its embedder is loading."""
        return self._semantic

    @property
    def why_no_semantic(self) -> str:
        return "" if self._semantic is not None else self._failed or "its embedder is being loaded"

    @property
    def states(self) -> dict[str, BreakerState]:
        store = self._context.store
        return dict(store.states) if isinstance(store, RedisStore) else {}

    @property
    def held(self) -> dict[str, int]:
        match self._context.store:
            case MemoryStore() as store:
                return {"memory": store.held}
            case RedisStore() as store:
                return {"redis_queue": store.queued}
        return {}

    @property
    def remote(self) -> bool:
        """Whether a lookup takes a round trip to another process."""
        return self._settings.redis is not None

    def allowance(self) -> Allowance:
        """Covers all lookups of a request together."""
        redis = self._settings.redis
        return Allowance(redis.budget if redis else MEMORY_BUDGET)

    async def partition(self, tenant: str, allowance: Allowance) -> str | None:
        """None where the store does not answer: do not share."""
        whole, prefixes = self._context.epochs.fresh(tenant), self._prefixes.fresh(tenant)
        if whole is None or prefixes is None:
            try:
                with allowance.spending() as within:
                    whole = await self._context.epochs.recent(tenant, within)
                with allowance.spending() as within:
                    prefixes = await self._prefixes.recent(tenant, within)
            except StoreFault:
                return None
        return self._context.partitions.of(tenant, whole + prefixes)

    def join(
        self, question: Question, generate: Generate, allowance: Allowance | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[AnswerPart]]:
        """Generates once for all identical requests of the moment; with no allowance left, other replicas are left out.
        Raises ValueError for questions that are not deterministic."""
        if not question.deterministic:
            raise ValueError("two generations of this question would differ")
        epoch = self._context.epochs.known(question.tenant) or b""
        key = self.responses.key(question, epoch, question.max_tokens)
        if self._shared is None:
            return self._single_flight.join(key, generate)
        within = None if allowance is None else allowance.left
        return self._single_flight.join(key, partial(self._shared.cross_process.generation, key, generate, within))

    def joinable(self, question: Question) -> bool:
        """Whether `join` might follow a generation under way, here or in any replica."""
        if self._shared is not None:
            return True
        epoch = self._context.epochs.known(question.tenant) or b""
        return self._single_flight.joinable(self.responses.key(question, epoch, question.max_tokens))

    async def flush_tenant(self, tenant: str) -> None:
        """Acts on every replica. Raises StoreFault, and has then flushed nothing."""
        await self._context.epochs.bump(tenant)

    async def flush(self, tenant: str, kinds: tuple[EntryKind, ...], entry_id: str = "") -> int:
        """Deletes entries of some kinds, or the one of that id; returns their number. Prefix blocks, not counted,
        become unreachable, on other replicas within a second. Raises StoreFault."""
        epoch = await self._context.epochs.current(tenant)
        partition = self._context.partitions.of(tenant, epoch)
        deleted = sum([await self._delete(kind, partition, entry_id) for kind in kinds if kind is not EntryKind.BLOCK])
        if EntryKind.BLOCK in kinds:
            await self._prefixes.bump(tenant)
        if EntryKind.RESPONSE in kinds:
            # A finished generation can still be joined for a moment, here and on other replicas.
            self._single_flight.forget_finished()
            await self._delete(EntryKind.LEASE, partition, "")
        return deleted

    def change(self, settings: CacheSettings) -> None:
        """Changes what both caches may do; their stores stay as they are."""
        self._settings = replace(self._settings, response=settings.response, semantic=settings.semantic)
        self.responses.change(settings.response)
        if self._semantic is not None:
            self._semantic.change(settings.semantic)
        self.load_semantic()

    def load_semantic(self) -> None:
        """Exports the embedder if need be; `semantic` is None until it is loaded."""
        if self._settings.semantic.mode is not Mode.OFF and self._loading is None:
            self._loading = asyncio.get_running_loop().create_task(self._load(), name="load embedder")

    async def loaded(self) -> bool:
        if self._loading is not None:
            await asyncio.wait([self._loading])
        return self._semantic is not None

    async def aclose(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait([self._loading])
        self._single_flight.close()
        if self._shared is not None:
            await self._shared.cross_process.aclose()
            await self._shared.link.aclose()
        if self._semantic is not None:
            await self._semantic.aclose()
        await self._context.store.aclose()

    async def _delete(self, kind: EntryKind, partition: str, entry_id: str) -> int:
        deleted = 0
        batch: list[CacheKey] = []
        async for key in self._context.store.scan(kind, partition):
            if key.digest.endswith(entry_id):
                batch.append(key)
            if len(batch) == BATCH:
                deleted += await self._context.store.delete_many(batch)
                batch.clear()
        return deleted + await self._context.store.delete_many(batch)

    async def _load(self) -> None:
        model = self._settings.semantic.model
        worker = ThreadPoolExecutor(1, "embedder")  # of its own: it may be minutes until it is exported
        exporter = Exporter()
        try:
            embedder = await asyncio.get_running_loop().run_in_executor(
                worker, lambda: open_embedder(exporter.exported(model))
            )
        except (ExportFailed, ImportError, OSError, ValueError) as error:
            log.error("cache: no semantic cache: %s", error)
            self._failed = f"its embedder cannot be loaded ({type(error).__name__}); the log has the reason"
            self._context.counter.count("semantic_unavailable", type(error).__name__)
            return
        finally:
            exporter.stop()
            worker.shutdown(wait=False)
        self._semantic = SimilarCache(self._context, embedder, self._settings.semantic)


def open_caches(settings: CacheSettings, identity: ModelIdentity, counter: Counter) -> Caches:
    """Does not wait for Redis, which may be down. Raises InvalidKeyFile."""
    keyring = open_keyring(settings.key_file)
    partitions = Partitions(keyring, identity)
    largest = max(settings.response.max_bytes, settings.semantic.max_bytes)
    redis = None if settings.redis is None else replace(settings.redis, largest=largest + OVERHEAD)
    if redis is not None and not keyring.shared:
        log.warning("cache: no key file: what lies in Redis is of no use to other replicas, nor to this one later")
    members = settings.semantic.max_entries
    store: Store = (
        MemoryStore(settings.memory_bytes, members=members) if redis is None else RedisStore(redis, counter, members)
    )
    envelope = Envelope(keyring, largest, counter)
    context = CacheContext(store, partitions, Epochs(store, partitions), envelope, counter)
    shared = None
    if redis is not None and isinstance(store, RedisStore) and keyring.shared:
        shared = _share(redis, store, envelope, settings.single_flight, counter)
    return Caches(settings, context, shared)


def _share(
    redis: RedisSettings, store: RedisStore, envelope: Envelope, settings: SingleFlightSettings, counter: Counter
) -> _Shared:
    patient = RedisLink(store.server, redis.write_budget, "flight", counter)
    return _Shared(CrossProcess(Leases(store.link, patient, settings), envelope, settings, counter), patient)
