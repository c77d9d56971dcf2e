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
from engine.api import GREEDY, GenerationRequest, Stopping
from service.core.answers.lookup import AnswerSources, Plan
from service.core.request import Access, CacheUse, ChatMessage, ChatPrompt, Origin

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
        self.turn = TURN
        self.hit, self.remote = hit, remote
        self.responses = self.semantic = self

    async def get(self, question: Question, allowance: Allowance) -> CachedCompletion | None:
        self.calls.append("get")
        return self.hit

    def begin(self, turn: Turn) -> Any:
        self.calls.append("begin")
        return lambda: self.calls.append("give up")

    def allowance(self) -> Allowance:
        return Allowance(1.0)

    async def partition(self, tenant: str, allowance: Allowance) -> str:
        return tenant

    async def lookup(self, turn: Turn, allowance: Allowance) -> SemanticLookup:
        self.calls.append("lookup")
        self.turn = turn
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


async def test_the_semantic_cache_is_told_which_token_asks() -> None:
    caches: Any = Asked(None, False)
    sources = object.__new__(AnswerSources)
    parts = {
        "_caches": SimpleNamespace(semantic_mode=Mode.ON, now=lambda: caches),
        "_switches": SimpleNamespace(on=lambda name: True),
    }
    vars(sources).update(parts)
    stops = SimpleNamespace(min_tokens=0, strings=(), token_ids=(), include=False)
    prompt = ChatPrompt((ChatMessage("user", "How do I sell a used car?"),))
    request: Any = SimpleNamespace(
        prompt=prompt,
        sampling=GREEDY,
        seeded=False,
        stops=stops,
        output=SimpleNamespace(logprobs=None, prompt_logprobs=None, skip_special=True),
        cache=CacheUse(),
        time_budget=None,
        constraint=None,
        answers=1,
    )
    asked = GenerationRequest(
        request_id="r", token_ids=(1,), sampling=GREEDY, stopping=Stopping(max_tokens=9), arrived_at=0.0
    )
    await sources.look(request, lambda root, bypass: asked, Origin("acme", 0.0, None, "token 7"))
    assert (caches.turn.question.tenant, caches.turn.caller) == ("acme", "token 7")
