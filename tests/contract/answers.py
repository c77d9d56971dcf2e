"""What tests of executors ask, and what comes of it: a scheduler over a runner, without a worker."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from engine.api import GREEDY, GenerationRequest, Stopping, TokenLogprob
from engine.execution.speculation.costs import Costs
from engine.fake.checked import CheckedRunner
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Runner
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence

FREE = Costs({1: 1.0, 512: 1.0})  # a wider step costs nothing, so that whatever is guessed is verified
KINDS = (
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=1),
    replace(GREEDY, temperature=0.7, top_p=0.9, seed=2),
    replace(GREEDY, temperature=1.2, top_k=20, min_p=0.05, seed=3),
    replace(GREEDY, repetition_penalty=1.3),
    replace(GREEDY, temperature=0.9, presence_penalty=0.6, frequency_penalty=0.3, seed=2**64 - 1),
    replace(GREEDY, temperature=1.0, seed=5, logit_bias=((7, 3.0), (9, -50.0))),
    GREEDY,
)
SIZES = (1, 5, 15, 16, 17, 40, 64, 100)  # tokens of prompts


def progress(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


def requests(count: int = 8, logprobs: int | None = None, tokens: int = 40) -> list[GenerationRequest]:
    """Greedy and seeded, plain and filtered, with and without penalties, of many lengths."""
    generator = torch.Generator().manual_seed(4)
    return [
        GenerationRequest(
            request_id=str(key),
            token_ids=tuple(torch.randint(0, 320, (SIZES[key % 8],), generator=generator).tolist()),
            sampling=KINDS[key % 8],
            stopping=Stopping(max_tokens=tokens + 7 * (key // 8), min_tokens=20, stop_token_ids=(3, 5)),
            arrived_at=0.0,
            logprobs=logprobs,
        )
        for key in range(count)
    ]


def alone() -> list[GenerationRequest]:
    """A text long enough to repeat itself, for executors of a row that decodes alone."""
    return [replace(requests(1)[0], stopping=Stopping(max_tokens=150))]


@dataclass
class Answer:
    """Of one request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


def generate(
    runner: Runner, asked: list[GenerationRequest], pages: int, budget: int, apart: int = 0
) -> dict[str, Answer]:
    """The answers; each request comes `apart` steps after the one before it."""
    checked, info = CheckedRunner(runner), runner.info
    limits = Limits(
        max_sequences=info.max_sequences,
        max_batch_tokens=budget,
        max_context=min(256, pages * 16),
        lookahead_tokens=info.lookahead_tokens,
        max_tokens_per_row=info.max_tokens_per_row,
    )
    scheduler, found, steps = Scheduler(limits, PagePool(pages)), [Answer() for _ in asked], 0
    waiting = list(enumerate(asked))
    while waiting or scheduler.live:
        while waiting and steps >= apart * waiting[0][0]:
            key, request = waiting.pop(0)
            scheduler.admit(Sequence(request, list(request.token_ids), key=key))
        steps += 1
        plan = scheduler.plan(steps * 0.01)
        if plan is None:
            continue
        for event in scheduler.commit(plan, checked.run(plan), steps * 0.01):
            assert event.failure is None
            found[event.key].ids += event.token_ids
            found[event.key].logprobs += event.logprobs
    return {request.request_id: answer for request, answer in zip(asked, found, strict=True)}
