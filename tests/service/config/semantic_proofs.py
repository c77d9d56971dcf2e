"""Proofs for what the semantic cache decides by."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from cache.api import Allowance, SemanticLookup, SemanticTurn, Verdict
from cache.semantic.evidence import CALLERS, DAY
from cache.semantic.search import SimilarCache
from cache.store.memory import MemoryStore
from service.config.settings import Settings
from tests.service.config.cache_proofs import QUESTION, answer, context
from tests.service.config.proofs import FAKE, Proof, Tools, becomes


class WordEmbedder:
    """Texts are as near as they have words in common."""

    digest = "words"
    width = 64

    def tokens(self, text: str) -> int:
        return len(text.split())

    def embed(self, text: str) -> Any:
        words = [np.random.default_rng(list(word.encode())).standard_normal(64) for word in text.lower().split()]
        total = np.sum(words, axis=0)
        return (total / np.linalg.norm(total)).astype(np.float32)


SELL = "how do I sell a used and slightly rusty car"
LIKE = "how do I sell a used but slightly dented bicycle"


def turn(text: str, caller: str = "one") -> SemanticTurn:
    question = replace(QUESTION, token_ids=tuple(text.encode()))
    return SemanticTurn(question=question, context=b"c", text=text, greedy=True, caller=caller)


def semantic(
    look: Callable[[SemanticLookup], Any], text: str = SELL, agreed: int = 0, later: float = 0.0
) -> Callable[[Settings, Tools], Any]:
    """What a lookup says of `text`, `later` seconds after SELL was answered and `agreed` times found to fit it."""

    async def effect(settings: Settings, tools: Tools) -> Any:
        now = [0.0]
        chosen = settings.cache.front().semantic
        store = MemoryStore(1 << 20, lambda: now[0])
        clock = itertools.count(1e9, DAY / 2).__next__  # between observations
        cache = SimilarCache(context(store), WordEmbedder(), chosen, chance=random.Random(1), clock=clock)
        try:
            await cache.put(turn(SELL), answer())
            for number in range(agreed):
                asked = turn(text, str(number % CALLERS))
                await cache.observe(asked, await cache.lookup(asked, Allowance(5.0)), answer())
            now[0] = later
            return look(await cache.lookup(turn(text), Allowance(5.0)))
        finally:
            await cache.aclose()

    return effect


def is_served(found: SemanticLookup) -> bool:
    return found.served is not None


def is_candidate(found: SemanticLookup) -> bool:
    return found.candidate is not None


def is_learned(found: SemanticLookup) -> bool:
    return found.verdict is Verdict.LEARNED


def is_audited(found: SemanticLookup) -> bool:
    return found.audit


ON = (*FAKE, "--cache.semantic.mode=on")
LOOSE = (*ON, "--cache.semantic.threshold=0.5")

PROOFS = {
    "cache.semantic.mode": Proof("on", semantic(is_served), becomes(False, True)),
    "cache.semantic.threshold": Proof("0.5", semantic(is_candidate, LIKE), becomes(False, True), ON),
    "cache.semantic.error-bound": Proof("0.5", semantic(is_learned, LIKE, agreed=20), becomes(False, True), LOOSE),
    "cache.semantic.audit": Proof("1", semantic(is_audited), becomes(False, True), ON),
    "cache.semantic.ttl": Proof("10", semantic(is_served, later=60.0), becomes(True, False), ON),
}
