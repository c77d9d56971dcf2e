"""Answers to questions that mean the same: what is decided about one, and by which cache."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cache.api.answers import Allowance, CachedCompletion, Turn
from cache.api.stores import CacheKey


class Mode(enum.StrEnum):
    """What the semantic cache may do."""

    OFF = "off"
    SHADOW = "shadow"  # decides and records, never serves
    ON = "on"


class Verdict(enum.StrEnum):
    """What became of a semantic lookup."""

    SKIPPED = "skipped"  # not eligible
    EMPTY = "empty"  # nothing near enough
    VETOED = "vetoed"
    UNPROVEN = "unproven"  # near, not vetoed, but neither equal in words nor with enough evidence
    STRICT = "strict"  # equal in words
    LEARNED = "learned"  # enough evidence
    FAULT = "fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A stored question near enough to be considered, with its answer."""

    entry: CacheKey
    similarity: float
    strict: bool
    completion: CachedCompletion


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticLookup:
    """What the semantic cache found and decided."""

    verdict: Verdict
    served: CachedCompletion | None = None  # in mode `on` alone
    candidate: Candidate | None = None  # what would be, or was, served or learned from
    veto: str = ""  # the rule that vetoed the nearest
    audit: bool = False  # generate off the path as well, and hand the answer to `observe`


class SemanticCache(Protocol):
    """Answers to questions that mean the same. Nothing here raises."""

    def begin(self, turn: Turn) -> Callable[[], object]:
        """Starts on what a `lookup` that is likely to follow can do without the store. The result gives it up."""

    async def lookup(self, turn: Turn, allowance: Allowance) -> SemanticLookup: ...

    async def put(self, turn: Turn, completion: CachedCompletion) -> bool: ...

    async def observe(self, lookup: SemanticLookup, generated: CachedCompletion) -> None:
        """Learns from a fresh answer whether the candidate's would have done."""
