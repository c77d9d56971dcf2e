"""Declares the protocol of the cache of similarly worded questions, and its decisions."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cache.api.answers import Allowance, CachedCompletion, SemanticTurn
from cache.api.stores import CacheKey


class Mode(enum.StrEnum):
    OFF = "off"
    SHADOW = "shadow"  # decides and records, never serves
    ON = "on"


class Verdict(enum.StrEnum):
    SKIPPED = "skipped"  # not eligible
    EMPTY = "empty"  # nothing near enough
    VETOED = "vetoed"
    UNPROVEN = "unproven"  # near, not vetoed, but neither equal in words nor with enough evidence
    STRICT = "strict"  # equal in words
    LEARNED = "learned"  # enough evidence
    FAULT = "fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCandidate:
    entry: CacheKey
    text: str  # the stored question
    similarity: float
    strict: bool
    completion: CachedCompletion


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticLookup:
    verdict: Verdict
    served: CachedCompletion | None = None  # in mode `on` alone
    candidate: AnswerCandidate | None = None  # what was served, or would be in mode `on`, or is to be learned from
    veto: str = ""  # the rule that vetoed the nearest
    audit: bool = False  # generate the answer behind the request as well, and hand it to `observe`


class SemanticCache(Protocol):
    """Answers similarly worded questions. Nothing here raises."""

    def begin(self, turn: SemanticTurn) -> Callable[[], object]:
        """Starts the part of a likely `lookup` that needs no store. Calling the result cancels it."""

    async def lookup(self, turn: SemanticTurn, allowance: Allowance) -> SemanticLookup: ...

    async def put(self, turn: SemanticTurn, completion: CachedCompletion) -> bool: ...

    async def observe(self, turn: SemanticTurn, lookup: SemanticLookup, generated: CachedCompletion) -> None:
        """Records whether the candidate's answer equals a freshly generated one of the turn."""
