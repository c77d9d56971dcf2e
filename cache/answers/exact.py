"""Caches exact answers: the same prompt, under the same parameters, of the same tenant and model.

An answer that stopped by itself serves every request whose max_tokens it stays below; one that was cut there serves
requests with that very limit. Nothing is shortened to fit: only a tokenizer knows where a text may be cut. Answers cut
by time, by context or by a caller are not kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from cache.answers.codec import pack_completion, unpack_completion
from cache.api import (
    LENGTH,
    STOPPED,
    Allowance,
    CachedCompletion,
    CacheKey,
    EntryKind,
    Question,
    ResponseSettings,
    StoreFault,
)
from cache.seal.context import CacheContext
from cache.seal.partition import Partitions, encode, encode_ids, epoch_of


def keepable(question: Question, completion: CachedCompletion) -> bool:
    """Whether the answer is complete, and the same each time it is generated."""
    if not question.deterministic or not completion.parts or completion.parts[-1].ending is None:
        return False
    ending = completion.ending
    if ending.reason in STOPPED:
        return True
    return ending.reason == LENGTH and ending.completion_tokens == completion.max_tokens == question.max_tokens


def serves(completion: CachedCompletion, question: Question, now: float) -> bool:
    if question.max_age is not None and now - completion.created_at > question.max_age:
        return False
    ending = completion.ending
    if ending.reason in STOPPED:
        # Below the limit it cannot have mattered; at the limit only if it was generated under one as tight.
        return question.max_tokens > ending.completion_tokens or question.max_tokens == completion.max_tokens
    return question.max_tokens == completion.max_tokens


def entry_digest(partitions: Partitions, question: Question, max_tokens: int | None) -> str:
    """`max_tokens` is None for answers that stopped by themselves."""
    return entry_digests(partitions, question, (max_tokens,))[0]


def entry_digests(partitions: Partitions, question: Question, limits: Sequence[int | None]) -> list[str]:
    if not question.encoded:  # the larger part of the work, and an answer is looked up, shared and kept
        question.encoded.extend((encode_ids(question.token_ids), encode(question.parameters)))
    return [partitions.digest(question.tenant, b"response", *question.encoded, encode(limit)) for limit in limits]


class ExactCache:
    def __init__(self, context: CacheContext, settings: ResponseSettings) -> None:
        self._store = context.store
        self._partitions = context.partitions
        self._epochs = context.epochs
        self._envelope = context.envelope
        self._counter = context.counter
        self._settings = settings

    def change(self, settings: ResponseSettings) -> None:
        """Applies from the next answer on."""
        self._settings = settings

    async def get(self, question: Question, allowance: Allowance) -> CachedCompletion | None:
        if not question.deterministic:
            self._counter.count("response_skipped", "not_deterministic")
            return None
        begun = time.perf_counter()
        try:
            with allowance.spending() as within:
                found = await self._find(question, within)
        except StoreFault:
            self._counter.count("response_lookup", "fault")
            return None
        self._counter.count("response_lookup", "miss" if found is None else "hit")
        self._counter.observe("response_lookup", time.perf_counter() - begun)
        return found

    async def put(self, question: Question, completion: CachedCompletion) -> bool:
        if not keepable(question, completion):
            self._counter.count("response_not_kept", "not_keepable")
            return False
        try:
            epoch = self._epochs.known(question.tenant) or await self._epochs.current(question.tenant)
        except StoreFault:
            self._counter.count("response_not_kept", "fault")
            return False
        stopped = completion.ending.reason in STOPPED
        key = self.key(question, epoch, None if stopped else question.max_tokens)
        sealed = self._envelope.seal(key, pack_completion(completion), self._settings.max_bytes)
        return sealed is not None and self._store.offer(key, sealed, self._settings.ttl)

    def key(self, question: Question, epoch: bytes, max_tokens: int | None) -> CacheKey:
        digest = entry_digest(self._partitions, question, max_tokens)
        return CacheKey(EntryKind.RESPONSE, self._partitions.of(question.tenant, epoch), digest)

    async def _find(self, question: Question, within: float) -> CachedCompletion | None:
        deadline = time.monotonic() + within
        epoch = self._epochs.known(question.tenant)
        standing = None
        if epoch is not None:
            standing, found = await self._read(question, epoch, within)
            if standing == epoch:
                self._epochs.learn(question.tenant, epoch)
                return found
        if standing is None:  # a tenant's first question, or its epoch was evicted
            standing = await self._epochs.current(question.tenant, deadline - time.monotonic())
        self._epochs.learn(question.tenant, standing)
        return (await self._read(question, standing, deadline - time.monotonic()))[1]

    async def _read(
        self, question: Question, epoch: bytes, within: float
    ) -> tuple[bytes | None, CachedCompletion | None]:
        partition = self._partitions.of(question.tenant, epoch)
        digests = entry_digests(self._partitions, question, (None, question.max_tokens))
        keys = [CacheKey(EntryKind.RESPONSE, partition, digest) for digest in digests]
        wanted = (self._partitions.epoch_key(question.tenant), *keys)
        read, *values = await self._store.get_many(wanted, within)
        standing = epoch_of(read)
        now = time.time()
        for key, sealed in zip(keys, values, strict=True):
            if sealed is None or (data := self._envelope.open(key, sealed)) is None:
                continue
            completion = unpack_completion(data, key.digest)
            if completion is not None and serves(completion, question, now):
                return standing, completion
        return standing, None
