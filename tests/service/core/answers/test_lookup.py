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
    SemanticTurn,
    Verdict,
)
from engine.api import GREEDY, GenerationRequest, Stopping
from service.core.answers.lookup import AnswerSources, CacheFindings
from service.core.request import Access, CacheUse, ChatMessage, ChatPrompt, Origin

QUESTION = Question(tenant="t", token_ids=(1,), parameters=(), max_tokens=9, deterministic=True)
TURN = SemanticTurn(question=QUESTION, context=b"", text="How do I sell a used car?", greedy=True)
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

    def begin(self, turn: SemanticTurn) -> Any:
        self.calls.append("begin")
        return lambda: self.calls.append("give up")

    def allowance(self) -> Allowance:
        return Allowance(1.0)

    async def partition(self, tenant: str, allowance: Allowance) -> str:
        return tenant

    async def lookup(self, turn: SemanticTurn, allowance: Allowance) -> SemanticLookup:
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
    caches = Asked(stored() if hit else None, remote)
    looked = await look(caches, mode, CacheUse(response=response, semantic=semantic))
    assert caches.calls == calls
    assert (looked.hit is not None) is hit


async def test_the_semantic_cache_is_told_which_token_asks() -> None:
    caches = Asked(None, False)
    await look(caches, Mode.ON, CacheUse())
    assert (caches.turn.question.tenant, caches.turn.caller) == ("acme", "token 7")


async def look(caches: Any, mode: Mode, use: CacheUse) -> CacheFindings:
    """Asks `caches` for the answer to a chat of one greedy question."""
    unused: Any = None
    kept: Any = SimpleNamespace(semantic_mode=mode, now=lambda: caches)
    switches: Any = SimpleNamespace(on=lambda name: True)
    stops = SimpleNamespace(min_tokens=0, strings=(), token_ids=(), include=False)
    request: Any = SimpleNamespace(
        prompt=ChatPrompt((ChatMessage("user", "How do I sell a used car?"),)),
        sampling=GREEDY,
        seeded=False,
        stops=stops,
        output=SimpleNamespace(logprobs=None, prompt_logprobs=None, skip_special=True),
        cache=use,
        time_budget=None,
        constraint=None,
        answers=1,
    )
    asked = GenerationRequest(
        request_id="r", token_ids=(1,), sampling=GREEDY, stopping=Stopping(max_tokens=9), arrived_at=0.0
    )
    sources = AnswerSources(unused, unused, kept, switches, unused)
    return await sources.look(request, asked, Origin("acme", 0.0, None, "token 7"))
