"""What engine tests share: requests, and a scheduler that drives a runner."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from engine.api import GREEDY, GenerationRequest, Stopping, TokenLogprob
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Runner
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence


@dataclass
class Answer:
    """What a driven request came to."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    failed: bool = False


@dataclass(frozen=True)
class Driven:
    """All answers of a run, with the scheduler's own count of what happened."""

    answers: list[Answer]
    preemptions: int
    steps: int


Request = Callable[..., GenerationRequest]
Drive = Callable[..., Driven]


@pytest.fixture
def request_of() -> Request:
    """token ids, max_tokens and any sampling field → a request; greedy by default."""

    def make(
        token_ids: Items[int],
        max_tokens: int = 8,
        *,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        min_tokens: int = 0,
        stop: tuple[int, ...] = (),
        **sampling: object,
    ) -> GenerationRequest:
        return GenerationRequest(
            request_id=str(token_ids),
            token_ids=tuple(token_ids),
            sampling=replace(GREEDY, **sampling),  # type: ignore[arg-type]
            stopping=Stopping(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop),
            arrived_at=0.0,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    return make


@pytest.fixture
def drive() -> Drive:
    """Runs requests to their ends through the real scheduler."""

    def run(
        runner: Runner, requests: Items[GenerationRequest], *, budget: int = 512, pages: int | None = None
    ) -> Driven:
        info = runner.info
        pages = pages or info.total_pages
        limits = Limits(
            max_sequences=info.max_sequences,
            max_batch_tokens=budget,
            max_context=min(info.max_context, pages * info.page_size),
            lookahead_tokens=info.lookahead_tokens,
            max_tokens_per_row=info.max_tokens_per_row,
        )
        scheduler = Scheduler(limits, PagePool(pages))
        answers = [Answer() for _ in requests]
        for key, request in enumerate(requests):
            scheduler.admit(Sequence(request, list(request.token_ids), key=key))
        now = 1.0
        while (plan := scheduler.plan(now)) is not None:
            now += 0.001
            for event in scheduler.commit(plan, runner.run(plan), now):
                answers[event.key].token_ids += event.token_ids
                answers[event.key].logprobs += event.logprobs
                answers[event.key].prompt_logprobs += event.prompt_logprobs
                answers[event.key].failed |= event.failure is not None
        return Driven(answers, scheduler.load.preemptions, scheduler.load.steps)

    return run
