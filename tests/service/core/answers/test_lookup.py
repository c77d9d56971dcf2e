"""In which order the caches are asked."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from cache.api import (
    Allowance,
    AnswerEnding,
    AnswerPart,
    CachedCompletion,
    Mode,
    Question,
    SemanticLookup,
    Turn,
    Verdict,
)
from service.core.answers.lookup import AnswerSources, Plan
from service.core.request import Access, CacheUse

QUESTION = Question(tenant="t", token_ids=(1,), parameters=(), max_tokens=9, deterministic=True)
TURN = Turn(question=QUESTION, context=b"", text="How do I sell a used car?", greedy=True)
BOTH, NONE = Access(True, True), Access(False, False)


def stored() -> CachedCompletion:
    ending = AnswerEnding(reason="stop", prompt_tokens=1, completion_tokens=1)
    return CachedCompletion(
        parts=(AnswerPart((1,), "a", ending),), max_tokens=9, provenance="p", created_at=time.time()
    )


class Asked:
    """Caches that write down who was asked what."""

    def __init__(self, hit: CachedCompletion | None, remote: bool) -> None:
        self.calls: list[str] = []
        self.hit, self.remote = hit, remote
        self.responses = self.semantic = self

    async def get(self, question: Question, allowance: Allowance) -> CachedCompletion | None:
        self.calls.append("get")
        return self.hit

    def begin(self, turn: Turn) -> Any:
        self.calls.append("begin")
        return lambda: self.calls.append("give up")

    async def lookup(self, turn: Turn, allowance: Allowance) -> SemanticLookup:
        self.calls.append("lookup")
        return SemanticLookup(verdict=Verdict.EMPTY)


@pytest.mark.parametrize(
    ("hit", "remote", "mode", "response", "semantic", "calls"),
    [
        (False, True, Mode.ON, BOTH, BOTH, ["begin", "get", "lookup"]),
        (True, True, Mode.ON, BOTH, BOTH, ["begin", "get", "give up"]),
        (False, False, Mode.ON, BOTH, BOTH, ["get", "lookup"]),
        (True, False, Mode.ON, BOTH, BOTH, ["get"]),
        (False, True, Mode.SHADOW, BOTH, BOTH, ["get"]),
        (False, True, Mode.ON, BOTH, NONE, ["get"]),
        (False, True, Mode.ON, NONE, BOTH, ["lookup"]),
    ],
)
async def test_the_embedder_works_while_a_store_elsewhere_is_asked(
    hit: bool, remote: bool, mode: Mode, response: Access, semantic: Access, calls: list[str]
) -> None:
    caches: Any = Asked(stored() if hit else None, remote)
    sources = object.__new__(AnswerSources)
    vars(sources)["_caches"] = SimpleNamespace(semantic_mode=mode)
    turn = None if semantic == NONE else TURN
    plan = Plan(caches, Allowance(1.0), QUESTION, turn, response, semantic)
    request: Any = SimpleNamespace(time_budget=None, cache=CacheUse())
    engine_request: Any = None
    looked = await sources._ask_caches(request, engine_request, plan, time.monotonic())
    assert caches.calls == calls
    assert (looked.hit is not None) is hit
