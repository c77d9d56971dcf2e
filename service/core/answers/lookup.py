"""Chooses an answer's source: the response cache, the semantic cache, an identical request's generation, or the engine.

x-cache: `hit-response`, `hit-semantic`; `miss`, asked in vain; `bypass`, two generations may differ or
log-probabilities are wanted; `off`, not asked.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from cache.api import (
    LINGER,
    Allowance,
    AnswerPart,
    CachedCompletion,
    LeaderRefused,
    Mode,
    Question,
    SemanticLookup,
    SemanticTurn,
)
from cache.open.caches import Caches
from engine.api import Engine, GenerationRequest, Priority
from engine.errors import EngineError
from service.core.admission.admission_slots import AdmissionSlots
from service.core.admission.quotas import Bill
from service.core.answers.caches import AnswerCaches
from service.core.answers.engine_answer import EngineAnswer, Generating
from service.core.answers.question import cacheable, question_of, turn_of
from service.core.answers.sources import AnswerSource, SharedAnswer, stored_parts
from service.core.errors import Overloaded
from service.core.model import ServedModel
from service.core.request import Access, CacheOutcome, CacheSource, Delivery, Origin, Request
from service.core.switches import RESPONSE_CACHE, SEMANTIC_CACHE, OptimizationSwitches
from service.observability.record import RecordBuilder

_NO = Access(False, False)
_BOTH = Access(True, True)
_SHARED = Delivery(16, 0.02)  # the coarsest that parts may be of an answer that several may read


@dataclass(frozen=True, slots=True)
class CachePlan:
    caches: Caches
    allowance: Allowance
    question: Question
    turn: SemanticTurn | None
    response: Access
    semantic: Access  # neither where there is no turn

    @property
    def learns(self) -> bool:
        return self.response.write or self.semantic != _NO


class CacheFindings(msgspec.Struct, frozen=True, kw_only=True):
    """The caches' result, and the request that the engine would get."""

    request: Request
    engine_request: GenerationRequest
    outcome: CacheOutcome
    plan: CachePlan | None = None  # None: the caches are not used
    hit: CachedCompletion | None = None
    similar: SemanticLookup | None = None
    shared: bool = False  # others who ask the same read the same generation

    @property
    def gather(self) -> bool:
        """Messages must gather parts that are as small as they were stored or shared."""
        return self.shared or self.hit is not None


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Led:
    answer: EngineAnswer
    record: RecordBuilder


@dataclass(frozen=True, slots=True)
class _Learner:
    caches: AnswerCaches
    plan: CachePlan
    similar: SemanticLookup | None

    def take(self, completion: CachedCompletion) -> None:
        self.caches.beside(lambda: self._learn(completion), "store")

    async def _learn(self, completion: CachedCompletion) -> None:
        plan, similar = self.plan, self.similar
        if plan.response.write:
            await plan.caches.responses.put(plan.question, completion)
        semantic = plan.caches.semantic
        if plan.turn is None or semantic is None:
            return
        if similar is None and plan.semantic.read:
            similar = await semantic.lookup(plan.turn, plan.caches.allowance())
        if plan.semantic.write:
            if similar is not None:
                await semantic.observe(plan.turn, similar, completion)
            await semantic.put(plan.turn, completion)


@dataclass(frozen=True, slots=True)
class _Completions:
    found: list[CachedCompletion] = field(default_factory=list)

    def take(self, completion: CachedCompletion) -> None:
        self.found.append(completion)


class AnswerSources:
    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        caches: AnswerCaches,
        switches: OptimizationSwitches,
        slots: AdmissionSlots,
    ) -> None:
        self._model = model
        self._slots = slots
        self._engine = engine
        self._caches = caches
        self._switches = switches
        self._leading: WeakValueDictionary[Question, Led] = WeakValueDictionary()

    @property
    def semantic(self) -> bool:
        return self._caches.semantic_mode is not Mode.OFF

    def may_know(self, request: Request) -> bool:
        """Whether a cache may have the answer, or another request be generating it."""
        accesses = (
            self._access(request.cache.response, RESPONSE_CACHE),
            self._access(request.cache.semantic, SEMANTIC_CACHE),
        )
        return cacheable(request) and any(access.read for access in accesses)

    async def look(self, request: Request, engine_request: GenerationRequest, origin: Origin) -> CacheFindings:
        """Takes no longer than the caches' budget and the embedder's milliseconds. The findings' engine request uses
        the tenant's prefix cache."""
        begun = time.monotonic()
        caches = self._caches.now()
        if caches is None:
            return CacheFindings(request=request, engine_request=engine_request, outcome=CacheOutcome(header="off"))
        allowance = caches.allowance()
        partition = await caches.partition(origin.tenant, allowance)
        # Without a partition the owner of these keys and values is unknown.
        bypass_prefix = request.cache.bypass_prefix or partition is None
        engine_request = replace(engine_request, prefix_root=(partition or "").encode(), bypass_prefix=bypass_prefix)
        response = self._access(request.cache.response, RESPONSE_CACHE)
        semantic = self._access(request.cache.semantic, SEMANTIC_CACHE)
        if response == semantic == _NO or not cacheable(request):
            outcome = CacheOutcome(header="off" if response == semantic == _NO else "bypass")
            return CacheFindings(request=request, engine_request=engine_request, outcome=outcome)
        question = question_of(request, engine_request, origin.tenant)
        named = request.cache.semantic is not None
        turn = None if semantic == _NO else turn_of(request, question, origin.caller, named)
        plan = CachePlan(caches, allowance, question, turn, response, _NO if turn is None else semantic)
        return await self._ask_caches(request, engine_request, plan, begun)

    def open(
        self, found: CacheFindings, origin: Origin, batch: Delivery, limit: int, bill: Bill | None = None
    ) -> AbstractAsyncContextManager[AnswerSource]:
        """Opens the answer for messages of `limit` tokens, and charges what is generated for it. Entering raises
        DeadlineExceeded or Overloaded where generation gets no slot."""
        if found.hit is not None:
            return self._stored(found, found.hit, origin, limit)
        if found.plan is not None and found.shared:
            return self._shared(found, found.plan, origin, batch, bill)
        work = Generating(found.request, found.engine_request, batch, origin, bill=bill)
        return self._generated(work, found.plan, found.similar)

    @asynccontextmanager
    async def _stored(
        self, found: CacheFindings, hit: CachedCompletion, origin: Origin, limit: int
    ) -> AsyncIterator[AnswerSource]:
        marked = bool(self._model.marks(found.request))
        detokenizer = self._model.text_maker(found.request) if _needs_cuts(found, hit, limit, marked) else None
        async with (
            aclosing(stored_parts(hit, detokenizer)) as kept,
            _reading(kept, None, origin) as source,
        ):
            yield source

    @asynccontextmanager
    async def _shared(
        self, found: CacheFindings, plan: CachePlan, origin: Origin, batch: Delivery, bill: Bill | None
    ) -> AsyncIterator[AnswerSource]:
        if self._slots.full and not plan.caches.joinable(plan.question):  # the same refusal, at less cost
            self._slots.check(found.engine_request.priority, origin.deadline, origin.tenant, after_lookup=True)
        request, fine = _for_all(found.engine_request), _no_coarser(batch, _SHARED)
        work = Generating(found.request, request, fine, origin, shared=True, bill=bill)
        own = self._generated(work, plan, found.similar)
        lead = partial(self._lead, plan.question, Led(own, origin.record))
        joined = plan.caches.join(plan.question, lead, plan.allowance)
        async with joined as parts, _reading(parts, own, origin, self._slots) as source:
            leader = self._leading.get(plan.question)
            if leader is not None and leader.answer is not own:
                origin.record.follows(leader.record)
            yield source

    def _lead(self, question: Question, led: Led) -> EngineAnswer:
        """Publishes this call's generation, which others may read even after the call has ended."""
        led.record.span()
        self._leading[question] = led
        return led.answer

    def _generated(self, work: Generating, plan: CachePlan | None, similar: SemanticLookup | None) -> EngineAnswer:
        learner = None if plan is None or not plan.learns else _Learner(self._caches, plan, similar)
        return EngineAnswer(self._engine, self._slots, self._model, work, learner)

    def _access(self, asked: Access | None, switch: str) -> Access:
        if not self._switches.on(switch):
            return _NO
        if switch == SEMANTIC_CACHE and self._caches.semantic_mode is Mode.OFF:
            return _NO
        return _BOTH if asked is None else asked

    async def _ask_caches(
        self, request: Request, engine_request: GenerationRequest, plan: CachePlan, begun: float
    ) -> CacheFindings:
        def findings(outcome: CacheOutcome, **found: Any) -> CacheFindings:
            return CacheFindings(request=request, engine_request=engine_request, outcome=outcome, plan=plan, **found)

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
                return findings(_hit("hit-response", CacheSource.RESPONSE, hit, begun), hit=hit)
        similar = None
        if semantic is not None and turn is not None:
            similar = await semantic.lookup(turn, plan.allowance)
            hit = similar.served
            if hit is not None:
                if similar.audit:
                    self._caches.beside(lambda: self._audit(request, plan, engine_request, similar), "audit")
                outcome = _hit("hit-semantic", CacheSource.SEMANTIC, hit, begun)
                alike = None if similar.candidate is None else similar.candidate.similarity
                return findings(replace(outcome, similarity=alike), hit=hit)
        outcome = CacheOutcome(header="miss" if asked else "off", lookup=time.monotonic() - begun)
        return findings(outcome, similar=similar, shared=plan.learns and _shareable(request, plan))

    async def _audit(
        self, request: Request, plan: CachePlan, engine_request: GenerationRequest, similar: SemanticLookup
    ) -> None:
        """Generates what was served from the cache, to compare; not while others want the engine."""
        semantic, turn, counters = plan.caches.semantic, plan.turn, self._caches.counters
        if semantic is None or turn is None:
            return
        if not self._slots.quiet or self._engine.load.waiting:
            counters.count("semantic_audit", "skipped")
            return
        background = replace(_for_all(engine_request), priority=Priority.BACKGROUND)
        work, completions = Generating(request, background, _SHARED), _Completions()
        answer = EngineAnswer(self._engine, self._slots, self._model, work, completions)
        try:
            while (await answer.next()).ending is None:
                pass
        except (EngineError, Overloaded, LeaderRefused):
            counters.count("semantic_audit", "failed")
        finally:
            answer.close()
        for whole in completions.found:
            await semantic.observe(turn, similar, whole)
            counters.count("semantic_audit", "done")


@asynccontextmanager
async def _reading(
    parts: AsyncIterator[AnswerPart], own: EngineAnswer | None, origin: Origin, slots: AdmissionSlots | None = None
) -> AsyncIterator[SharedAnswer]:
    """Refused callers must not have received headers, or they do not retry."""
    answer = SharedAnswer(parts, own, origin.deadline, slots, origin.arrived_at)
    try:
        await answer.opened()
        yield answer
    finally:
        answer.close()


def _shareable(request: Request, plan: CachePlan) -> bool:
    own_way = request.time_budget is not None or request.cache.bypass_prefix
    fresh = request.cache.max_age is not None and request.cache.max_age < LINGER
    return plan.response == _BOTH and not own_way and not fresh


def _needs_cuts(found: CacheFindings, hit: CachedCompletion, limit: int, marks: bool) -> bool:
    sizes = [len(part.token_ids) for part in hit.parts]
    return found.request.output.text and (marks or limit < sum(sizes)) and max(sizes) > 1


def _no_coarser(batch: Delivery, than: Delivery) -> Delivery:
    return Delivery(
        min(batch.max_tokens, than.max_tokens), min(batch.max_delay, than.max_delay), batch.coalescing_delay
    )


def _for_all(request: GenerationRequest) -> GenerationRequest:
    """Drops the deadline: readers leave when their own time is over."""
    name = f"{request.request_id}+{secrets.token_hex(4)}"
    return replace(request, request_id=name, deadline=None, expires_at=None)


def _hit(header: str, source: CacheSource, hit: CachedCompletion, begun: float) -> CacheOutcome:
    return CacheOutcome(
        header=header,
        source=source,
        lookup=time.monotonic() - begun,
        entry_id=hit.entry_id,
        age=max(0.0, time.time() - hit.created_at),
    )
