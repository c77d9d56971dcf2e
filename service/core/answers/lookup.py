"""Where an answer comes from: the response cache, the semantic cache, a generation that others read along, or the
engine alone.

x-cache: `hit-response`, `hit-semantic`; `miss`, asked in vain; `bypass`, two generations may differ or
log-probabilities are wanted; `off`, not asked.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from cache.api import LINGER, Allowance, AnswerPart, CachedCompletion, Mode, Question, Refused, SemanticLookup, Turn
from cache.open.caches import Caches
from engine.api import Engine, GenerationRequest, Priority, TokenStream
from engine.errors import DeadlineExceeded, EngineError
from service.core.admission_slots import AdmissionSlot, AdmissionSlots
from service.core.answers.caches import AnswerCaches
from service.core.answers.question import cacheable, question_of, turn_of
from service.core.answers.streams import AnswerStream, Generated, Leader, stored
from service.core.errors import Overloaded
from service.core.model import ServedModel
from service.core.request import Access, CacheOutcome, CacheSource, Delivery, Origin, Request
from service.core.switches import RESPONSE_CACHE, SEMANTIC_CACHE, Switches

_NO = Access(False, False)
_BOTH = Access(True, True)
_WHOLE = Delivery(1024, 0.1)  # nobody watches


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request does with the caches."""

    caches: Caches
    allowance: Allowance
    question: Question
    turn: Turn | None
    response: Access
    semantic: Access  # neither where there is no turn

    @property
    def learns(self) -> bool:
        """Whether its answer is of use to the caches."""
        return self.response.write or self.semantic != _NO


@dataclass(frozen=True, slots=True)
class Looked:
    """What the caches said."""

    request: GenerationRequest
    served: CacheOutcome
    plan: Plan | None = None  # None: they were not asked
    hit: CachedCompletion | None = None
    similar: SemanticLookup | None = None

    @property
    def chunked(self) -> bool:
        """Whether the answer is stored or shared, and not the engine's own stream."""
        return self.hit is not None or (self.plan is not None and self.plan.learns)


@dataclass(frozen=True, slots=True)
class Source:
    """An answer to be read."""

    stream: TokenStream
    slot: AdmissionSlot | None = None  # where the stream is the engine's own
    generated: Generated | None = None  # filled if it is generated for this request; None: nobody else reads it


class Sources:
    """Finds answers, or has them made."""

    def __init__(
        self, model: ServedModel, engine: Engine, caches: AnswerCaches, switches: Switches, slots: AdmissionSlots
    ) -> None:
        self._model = model
        self._slots = slots
        self._engine = engine
        self._caches = caches
        self._switches = switches

    @property
    def semantic(self) -> bool:
        """Whether there is a semantic cache."""
        return self._caches.semantic_mode is not Mode.OFF

    def may_know(self, ask: Request) -> bool:
        """Whether a cache may have the answer, or somebody else be generating it."""
        accesses = (
            self._access(ask.cache.response, RESPONSE_CACHE),
            self._access(ask.cache.semantic, SEMANTIC_CACHE),
        )
        return cacheable(ask) and any(access.read for access in accesses)

    async def look(self, ask: Request, request: GenerationRequest, tenant: str) -> Looked:
        """Asks the caches. Takes no longer than their budget, and the embedder's milliseconds."""
        begun = time.monotonic()
        caches = self._caches.now()
        if caches is None:
            return Looked(replace(request, bypass_prefix=True), CacheOutcome(header="off"))
        allowance = caches.allowance()
        partition = await caches.partition(tenant, allowance)
        # Without a partition nobody can say whose keys and values these are.
        request = replace(
            request,
            prefix_root=(partition or "").encode(),
            bypass_prefix=ask.cache.bypass_prefix or partition is None,
        )
        response = self._access(ask.cache.response, RESPONSE_CACHE)
        semantic = self._access(ask.cache.semantic, SEMANTIC_CACHE)
        if response == semantic == _NO or not cacheable(ask):
            return Looked(request, CacheOutcome(header="off" if response == semantic == _NO else "bypass"))
        question = question_of(ask, request, tenant)
        turn = None if semantic == _NO else turn_of(ask, question, ask.cache.semantic is not None)
        plan = Plan(caches, allowance, question, turn, response, _NO if turn is None else semantic)
        return await self._ask_caches(ask, request, plan, begun)

    @asynccontextmanager
    async def open(self, looked: Looked, ask: Request, origin: Origin, batch: Delivery) -> AsyncIterator[Source]:
        """The answer. Leaving the block lets go of it. Raises DeadlineExceeded or Overloaded where it would have to be
        generated and there is no slot."""
        plan, hit = looked.plan, looked.hit
        if plan is None or not looked.chunked:
            request = looked.request
            with self._slots.take(request.priority, len(request.token_ids), origin.deadline) as slot:
                stream = self._engine.submit(request)
                stream.batch(batch.max_tokens, batch.max_delay)
                try:
                    yield Source(stream, slot)
                finally:
                    stream.cancel()
            return
        if hit is not None:
            async with aclosing(stored(hit)) as kept, _reading(kept, Generated(), origin) as source:
                yield source
            return
        shared = self._shareable(ask, plan)
        if self._slots.full and not (shared and plan.caches.flying(plan.question)):  # the same refusal, at less cost
            self._slots.check(looked.request.priority, origin.deadline, looked=True)
        request = _for_all(looked.request) if shared else looked.request
        leader = Leader(
            self._engine,
            request,
            lambda: self._model.text_maker(ask),
            batch,
            lambda: self._enter(request, origin.deadline),
            lambda whole: self._caches.beside(lambda: self._learn(plan, looked.similar, whole), "store"),
        )
        making = plan.caches.join(plan.question, leader.parts, plan.allowance) if shared else aclosing(leader.parts())
        async with making as parts, _reading(parts, leader.generated, origin) as source:
            yield source

    def _enter(self, request: GenerationRequest, deadline: float | None) -> AdmissionSlot:
        try:
            return self._slots.take(request.priority, len(request.token_ids), deadline)
        except (DeadlineExceeded, Overloaded) as error:
            raise Refused(error) from None

    def _access(self, asked: Access | None, switch: str) -> Access:
        if not self._switches.on(switch):
            return _NO
        if switch == SEMANTIC_CACHE and self._caches.semantic_mode is Mode.OFF:
            return _NO
        return _BOTH if asked is None else asked

    def _shareable(self, ask: Request, plan: Plan) -> bool:
        """Whether this request may read along with others, and they with it."""
        own_way = ask.time_budget is not None or ask.cache.bypass_prefix
        fresh = ask.cache.max_age is not None and ask.cache.max_age < LINGER
        return plan.response == _BOTH and not own_way and not fresh

    async def _ask_caches(self, ask: Request, request: GenerationRequest, plan: Plan, begun: float) -> Looked:
        asked = plan.response.read or plan.semantic.read
        serves = self._caches.semantic_mode is Mode.ON and plan.semantic.read
        semantic, turn = plan.caches.semantic if serves else None, plan.turn
        if plan.response.read:
            # A store elsewhere takes its time, which the embedder can use; one in memory answers at once.
            ahead = semantic if plan.caches.remote else None
            give_up = None if ahead is None or turn is None else ahead.begin(turn)
            hit = await plan.caches.responses.get(plan.question, plan.allowance)
            if hit is not None:
                if give_up is not None:
                    give_up()
                return Looked(request, _served("hit-response", CacheSource.RESPONSE, hit, begun), plan, hit)
        similar = None
        if semantic is not None and turn is not None:
            similar = await semantic.lookup(turn, plan.allowance)
            if similar.served is not None:
                if similar.audit:
                    self._caches.beside(lambda: self._audit(ask, plan, request, similar), "audit")
                served = _served("hit-semantic", CacheSource.SEMANTIC, similar.served, begun)
                alike = None if similar.candidate is None else similar.candidate.similarity
                return Looked(request, replace(served, similarity=alike), plan, similar.served)
        served = CacheOutcome(header="miss" if asked else "off", lookup=time.monotonic() - begun)
        return Looked(request, served, plan, None, similar)

    async def _learn(self, plan: Plan, similar: SemanticLookup | None, whole: CachedCompletion) -> None:
        """Off the request's path: stores the answer, and lets the semantic cache see what it would have said."""
        if plan.response.write:
            await plan.caches.responses.put(plan.question, whole)
        semantic = plan.caches.semantic
        if plan.turn is None or semantic is None:
            return
        if similar is None and plan.semantic.read:
            similar = await semantic.lookup(plan.turn, plan.caches.allowance())
        if plan.semantic.write:
            if similar is not None:
                await semantic.observe(similar, whole)
            await semantic.put(plan.turn, whole)

    async def _audit(self, ask: Request, plan: Plan, request: GenerationRequest, similar: SemanticLookup) -> None:
        """Generates what was served from the cache, to see whether that was right; not while others want the engine."""
        semantic, counters = plan.caches.semantic, self._caches.counters
        if semantic is None:
            return
        if not self._slots.quiet or self._engine.load.waiting:
            counters.count("semantic_audit", "skipped")
            return
        found: list[CachedCompletion] = []
        behind = replace(_for_all(request), priority=Priority.BACKGROUND)
        leader = Leader(
            self._engine,
            behind,
            lambda: self._model.text_maker(ask),
            _WHOLE,
            lambda: self._enter(behind, None),
            found.append,
        )
        try:
            async with aclosing(leader.parts()) as parts:
                async for _ in parts:
                    pass
        except (EngineError, Refused):
            counters.count("semantic_audit", "failed")
        for whole in found:
            await semantic.observe(similar, whole)
            counters.count("semantic_audit", "done")


@asynccontextmanager
async def _reading(parts: AsyncIterator[AnswerPart], generated: Generated, origin: Origin) -> AsyncIterator[Source]:
    """An answer that is under way: callers that are refused must not have been sent headers, or they do not retry."""
    stream = AnswerStream(parts, generated, origin.arrived_at, origin.deadline)
    try:
        await stream.opened()
        yield Source(stream, generated=generated)
    finally:
        stream.cancel()


def _for_all(request: GenerationRequest) -> GenerationRequest:
    """The same, belonging to nobody: those who read it leave when their own time is over."""
    name = f"{request.request_id}+{secrets.token_hex(4)}"
    return replace(request, request_id=name, deadline=None, expires_at=None)


def _served(header: str, source: CacheSource, hit: CachedCompletion, begun: float) -> CacheOutcome:
    return CacheOutcome(
        header=header,
        source=source,
        lookup=time.monotonic() - begun,
        entry_id=hit.entry_id,
        age=max(0.0, time.time() - hit.created_at),
    )
