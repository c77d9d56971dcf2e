"""The semantic cache: finds similar questions, decides by guard and evidence, then serves or learns."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from cache.answers.exact import entry_digest, keepable, serves
from cache.api import (
    STOPPED,
    Allowance,
    AnswerCandidate,
    CachedCompletion,
    CacheKey,
    EntryKind,
    Mode,
    SemanticLookup,
    SemanticSettings,
    SemanticTurn,
    StoreFault,
    Verdict,
)
from cache.seal.context import CacheContext
from cache.seal.partition import encode, epoch_of
from cache.semantic.candidates import CandidateIndex, CandidateStore
from cache.semantic.embedder import Embedder
from cache.semantic.entry import SemanticEntry, Stored, pack_entry
from cache.semantic.evidence import Evidence, proven, refuted
from cache.semantic.guard import fleeting, strictly_equal, veto
from cache.semantic.observations import DIRECTORY_DIGITS, Observations

FORM = 3  # version of the rules; entries and evidence of other versions are not found
LONGEST = 4096  # characters of a question, several times what the embedder's tokens hold; bounds the work of all rules
_PERSONAL = re.compile(r"[\w.+-]{1,64}@[\w-]{1,64}\.\w|\d[\d -]{7,}\d")  # addresses, telephone and account numbers


def same_answer(one: CachedCompletion, other: CachedCompletion) -> bool:
    return one.text.split() == other.text.split()


@dataclass(frozen=True, slots=True)
class _SimilarQuestion:
    key: CacheKey
    similarity: float
    stored: Stored
    veto: str
    wrong: bool  # as the answer to a question of equal words, once


@dataclass(frozen=True, slots=True)
class _Read:
    found: list[_SimilarQuestion]  # best first
    strict: Evidence  # of all pairs of equal words in the directory


def _unfit(turn: SemanticTurn) -> str:
    """Empty for an eligible question. `fleeting` takes longer and is checked later."""
    if not (turn.greedy and turn.question.deterministic):
        return "not_greedy"
    if not turn.plain:
        return "not_plain"
    if len(turn.text) > LONGEST:
        return "too_long"
    return "personal" if _PERSONAL.search(turn.text) else ""


def _nothing() -> None:
    pass


class SimilarCache:
    def __init__(
        self,
        context: CacheContext,
        embedder: Embedder,
        settings: SemanticSettings,
        same: Callable[[CachedCompletion, CachedCompletion], bool] = same_answer,
        chance: random.Random | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._context = context
        self._settings = settings
        self._digest = embedder.digest
        self._same = same
        self._chance = chance or random.Random()
        self._observations = Observations(context, clock)
        self._candidates = CandidateStore(context, embedder, settings.max_indexed)

    def change(self, settings: SemanticSettings) -> None:
        """Applies from the next question on."""
        self._settings = settings

    def begin(self, turn: SemanticTurn) -> Callable[[], object]:
        if self._settings.mode is Mode.OFF or _unfit(turn):
            return _nothing
        return self._candidates.begin(turn.text, (self._settings.min_tokens, self._settings.max_tokens), fleeting)

    async def lookup(self, turn: SemanticTurn, allowance: Allowance) -> SemanticLookup:
        begun = time.perf_counter()
        if reason := self._why_not(turn):
            self._context.counter.count("semantic_skipped", reason)
            return SemanticLookup(verdict=Verdict.SKIPPED)
        try:
            found = await self._lookup(turn, allowance)
        except StoreFault:
            found = SemanticLookup(verdict=Verdict.FAULT)
        self._context.counter.count("semantic_lookup", found.verdict.value)
        if found.veto:
            self._context.counter.count("semantic_veto", found.veto)
        self._context.counter.observe("semantic_lookup", time.perf_counter() - begun)
        return found

    async def put(self, turn: SemanticTurn, completion: CachedCompletion) -> bool:
        """Leaves answers that a limit cut to the exact cache."""
        question = turn.question
        if self._why_not(turn) or not keepable(question, completion) or completion.ending.reason not in STOPPED:
            return False
        vector = await self._candidates.embed(turn.text, self._settings.min_tokens, self._settings.max_tokens)
        if vector is None:
            return False
        try:
            epochs = self._context.epochs
            epoch = epochs.known(question.tenant) or await epochs.current(question.tenant)
        except StoreFault:
            return False
        directory = self._directory(turn, epoch)
        digest = directory.digest + entry_digest(self._context.partitions, question, None)
        key = CacheKey(EntryKind.SEMANTIC, directory.partition, digest)
        packed = pack_entry(SemanticEntry(turn.text, vector, completion))
        sealed = self._context.envelope.seal(key, packed, self._settings.max_bytes)
        if sealed is None or not self._context.store.offer(key, sealed, self._settings.ttl, directory):
            return False
        await self._candidates.add(self._candidates.index(directory), digest, vector)
        return True

    async def observe(self, turn: SemanticTurn, lookup: SemanticLookup, generated: CachedCompletion) -> None:
        """Deletes an entry that the audit finds wrong."""
        candidate = lookup.candidate
        if candidate is None:
            return
        right = self._same(candidate.completion, generated)
        self._context.counter.count("semantic_observed", f"{'right' if right else 'wrong'}")
        entry, notes, tenant = candidate.entry, self._observations, turn.question.tenant
        try:
            if candidate.strict:
                await notes.add(notes.strict(entry), tenant, turn.caller, right)
            elif turn.caller:
                await self._learn(turn, candidate, right)
            if not right:
                await notes.add(notes.wrongs(entry, candidate.strict), tenant, turn.caller, right)
            if not right and (lookup.audit or candidate.strict):
                await self._context.store.delete_many([entry])
        except StoreFault:
            self._context.counter.count("semantic_observed", "fault")

    async def _learn(self, turn: SemanticTurn, candidate: AnswerCandidate, right: bool) -> None:
        notes, tenant, entry = self._observations, turn.question.tenant, candidate.entry
        key = notes.learned(tenant, entry, turn.text, candidate.text)
        if right:
            await notes.learn(key, notes.day(tenant, entry), tenant, turn.caller)
        else:
            await notes.add(key, tenant, turn.caller, right)

    async def aclose(self) -> None:
        await self._candidates.aclose()

    def _why_not(self, turn: SemanticTurn) -> str:
        if self._settings.mode is Mode.OFF:
            return "off"
        return _unfit(turn) or ("fleeting" if fleeting(turn.text) else "")

    async def _lookup(self, turn: SemanticTurn, allowance: Allowance) -> SemanticLookup:
        settings, tenant = self._settings, turn.question.tenant
        epoch = self._context.epochs.known(tenant)
        if epoch is None:
            with allowance.spending() as within:
                epoch = await self._context.epochs.current(tenant, within)
        index = self._candidates.index(self._directory(turn, epoch))
        bounds, count = (settings.min_tokens, settings.max_tokens), settings.candidates
        nearest, _ = await asyncio.gather(
            self._candidates.nearest(index, turn.text, bounds, count), self._follow(index, allowance)
        )
        if nearest is None:
            return SemanticLookup(verdict=Verdict.SKIPPED)
        nearest = await self._candidates.refreshed(index, nearest, count)
        least = max(settings.strict_threshold, turn.threshold or 0.0)
        near = [(digest, similarity) for digest, similarity in nearest.found if similarity >= least]
        if not near:
            return SemanticLookup(verdict=Verdict.EMPTY)
        read = await self._read(turn, index, near, epoch, allowance)
        return await self._decide(turn, read, allowance)

    async def _follow(self, index: CandidateIndex, allowance: Allowance) -> None:
        with allowance.spending() as within:
            await self._candidates.follow(index, within)

    async def _read(
        self,
        turn: SemanticTurn,
        index: CandidateIndex,
        near: list[tuple[str, float]],
        epoch: bytes,
        allowance: Allowance,
    ) -> _Read:
        keys = [CacheKey(EntryKind.SEMANTIC, index.directory.partition, digest) for digest, _ in near]
        marks = [self._observations.wrongs(key, strict=True) for key in keys]
        strict = self._observations.strict(keys[0])
        wanted = (self._context.partitions.epoch_key(turn.question.tenant), strict, *keys, *marks)
        with allowance.spending() as within:
            read, pooled, *rest = await self._context.store.get_many(wanted, within)
        standing = epoch_of(read)
        if standing != epoch:
            if standing is not None:
                self._context.epochs.learn(turn.question.tenant, standing)
            raise StoreFault("another epoch")
        found: list[_SimilarQuestion] = []
        gone: list[str] = []
        for place, (key, (_, similarity)) in enumerate(zip(keys, near, strict=True)):
            sealed, mark = rest[place], self._observations.open(marks[place], rest[len(keys) + place])
            stored = None if sealed is None else self._candidates.open(key, sealed)
            if stored is None:
                gone.append(key.digest)
            else:
                found.append(_SimilarQuestion(key, similarity, stored, veto(turn.text, stored.text), mark.wrong > 0))
        if gone:
            await self._candidates.drop(index, gone)
        return _Read(found, self._observations.open(strict, pooled))

    async def _decide(self, turn: SemanticTurn, read: _Read, allowance: Allowance) -> SemanticLookup:
        """A vetoed nearest candidate must not hide a second one that is right."""
        first = self._first(turn, read.found)
        if first is None:
            vetoed = next((each.veto for each in read.found if each.veto), "")
            return SemanticLookup(verdict=Verdict.VETOED if vetoed else Verdict.EMPTY, veto=vetoed)
        found, candidate = first
        bound = (self._settings.error_bound, self._settings.confidence)
        if candidate.strict:
            if refuted(read.strict, *bound) or found.wrong:
                return SemanticLookup(verdict=Verdict.UNPROVEN, candidate=candidate)
            return self._served(candidate, Verdict.STRICT)
        # Callers without a name are one, and evidence of one proves nothing.
        if turn.caller and not found.wrong and await self._learned(turn, candidate, bound, allowance):
            return self._served(candidate, Verdict.LEARNED)
        return SemanticLookup(verdict=Verdict.UNPROVEN, candidate=candidate)

    async def _learned(
        self, turn: SemanticTurn, candidate: AnswerCandidate, bound: tuple[float, float], allowance: Allowance
    ) -> bool:
        notes, entry = self._observations, candidate.entry
        keys = (
            notes.learned(turn.question.tenant, entry, turn.text, candidate.text),
            notes.wrongs(entry, strict=False),
        )
        with allowance.spending() as within:
            pooled, own = await notes.read(keys, within)
        return own.wrong == 0 and proven(pooled, *bound)

    def _first(
        self, turn: SemanticTurn, found: list[_SimilarQuestion]
    ) -> tuple[_SimilarQuestion, AnswerCandidate] | None:
        threshold = max(self._settings.threshold, turn.threshold or 0.0)
        open_ = [(not strictly_equal(turn.text, each.stored.text), each) for each in found if not each.veto]
        for loose, each in sorted(open_, key=lambda pair: pair[0]):
            if loose and each.similarity < threshold:
                continue
            completion = each.stored.completion()
            if completion is None:
                self._candidates.reject()
            elif serves(completion, turn.question, time.time()):
                return each, AnswerCandidate(
                    entry=each.key,
                    text=each.stored.text,
                    similarity=each.similarity,
                    strict=not loose,
                    completion=completion,
                )
        return None

    def _served(self, candidate: AnswerCandidate, verdict: Verdict) -> SemanticLookup:
        on = self._settings.mode is Mode.ON
        return SemanticLookup(
            verdict=verdict,
            served=candidate.completion if on else None,
            candidate=candidate,
            audit=on and self._chance.random() < self._settings.audit,
        )

    def _directory(self, turn: SemanticTurn, epoch: bytes) -> CacheKey:
        partitions, question = self._context.partitions, turn.question
        parts = (encode(FORM), encode(turn.context), encode(question.parameters), self._digest.encode())
        digest = partitions.digest(question.tenant, b"semantic", *parts)[:DIRECTORY_DIGITS]
        return CacheKey(EntryKind.DIRECTORY, partitions.of(question.tenant, epoch), digest)
