"""What a request may ask for, feature by feature, and answers of requests that share their steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Final

import torch
from msgspec.structs import replace

from engine.api import GREEDY, Constraint, GenerationRequest, Stopping, TokenLogprob
from engine.fake.checked import CheckedRunner
from engine.ipc.events import Failure
from engine.kv.page_pool import PagePool
from engine.kv.prefix_index import PrefixIndex
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Runner
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence

VOCABULARY: Final = 320
TOKENS: Final = 10  # of an answer
PREEMPTED_AT: Final = (5, 9)  # steps before which all rows but the first lose their slots
MANY_STOPS: Final = tuple(range(200, 212))  # more than any kernel's row holds
Change = Callable[[GenerationRequest], GenerationRequest]


def prompt(seed: int, length: int = 37) -> tuple[int, ...]:
    """Ids that repeat themselves, so that prompt lookup has something to propose."""
    generator = torch.Generator().manual_seed(seed)
    motif = torch.randint(0, VOCABULARY, (7,), generator=generator).tolist()
    return tuple((motif * length)[:length])


HEAD: Final = prompt(1000, 32)  # two full pages


def plain(seed: int, request_id: str = "") -> GenerationRequest:
    """Greedy, without drafts."""
    return GenerationRequest(
        request_id=request_id or f"plain {seed}",
        token_ids=prompt(seed),
        sampling=GREEDY,
        stopping=Stopping(max_tokens=TOKENS),
        arrived_at=0.0,
        draft_limit=0,
    )


def _sampled(**fields: object) -> Change:
    return lambda one: replace(one, sampling=replace(one.sampling, **fields))


def _stopping(**fields: object) -> Change:
    return lambda one: replace(one, stopping=replace(one.stopping, **fields))


def _early_stop(one: GenerationRequest) -> GenerationRequest:
    """Token 3 is likely, stops the answer, and is barred at first."""
    biased = (*one.sampling.logit_bias, (3, 4.0))
    stopping = replace(one.stopping, min_tokens=6, stop_token_ids=(3, 5))
    return replace(one, sampling=replace(one.sampling, logit_bias=biased), stopping=stopping)


FEATURES: Final[Mapping[str, Change]] = {
    "speculation": lambda one: replace(one, draft_limit=None),
    "constraint": lambda one: replace(one, constraint=Constraint("")),
    "logprobs": lambda one: replace(one, logprobs=2),
    "prompt logprobs": lambda one: replace(one, prompt_logprobs=3),
    "scoring alone": lambda one: replace(
        one, prompt_logprobs=0, stopping=replace(one.stopping, max_tokens=0, min_tokens=0)
    ),
    "one token": lambda one: replace(one, token_ids=one.token_ids[:1]),
    "penalties": _sampled(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3),
    "temperature": _sampled(temperature=0.9, seed=11),
    "filters": _sampled(temperature=1.1, seed=2**64 - 1, top_k=40, top_p=0.9, min_p=0.02),
    "logit bias": lambda one: _sampled(logit_bias=(*one.sampling.logit_bias, (7, 3.0), (9, -50.0)))(one),
    "min tokens": _early_stop,
    "many stops": _stopping(stop_token_ids=MANY_STOPS),
    "siblings": lambda one: replace(one, siblings=2),
    "prefix": lambda one: replace(one, token_ids=HEAD + one.token_ids),
    "preemption": lambda one: one,  # what happens to the step's rows
}
LATE: Final = ("prefix", "one token", "scoring alone")  # said after the others, in this order


def asking(features: Items[str], seed: int) -> list[GenerationRequest]:
    """A request with all of these, or two where it has a sibling."""
    names = [name for name in features if name not in LATE] + [name for name in LATE if name in features]
    one = plain(seed, f"{' + '.join(features)} #{seed}")
    for name in names:
        one = FEATURES[name](one)
    if one.siblings == 1:
        return [one]
    seed = one.sampling.seed
    other = replace(one, request_id=one.request_id + " sibling", number=1)
    return [one, replace(other, sampling=replace(one.sampling, seed=(seed + 1) % 2**64))]


@dataclass
class Answer:
    """Of one request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str = ""
    failure: Failure | None = None
    cached_tokens: int = 0
    proposed: int = 0


@dataclass(frozen=True)
class Arrival:
    """A request, and the step before which it comes."""

    request: GenerationRequest
    step: int = 0


@dataclass
class Mixed:
    """What came of requests that shared steps."""

    answers: dict[str, Answer]
    preemptions: int
    widest: int  # rows of a step


def together(
    runner: Runner,
    arrivals: Items[Arrival],
    *,
    pages: int | None = None,
    budget: int = 24,
    preempted_at: Items[int] = (),
    warm: bool = False,
) -> Mixed:
    """Through a scheduler of their own, whose plans and results are held to their rules. `warm`: somebody has computed
    HEAD before."""
    checked, info = CheckedRunner(runner), runner.info
    pages = pages or info.total_pages
    limits = Limits(
        max_sequences=info.max_sequences,
        max_batch_tokens=budget,
        max_context=min(info.max_context, 256, pages * 16),
        lookahead_tokens=info.lookahead_tokens,
        max_tokens_per_row=info.max_tokens_per_row,
    )
    pool = PagePool(pages)
    scheduler = Scheduler(limits, pool, prefixes=PrefixIndex(pool, b"model"))
    coming = [(at, one) for at, one in enumerate(arrivals)]
    if warm:
        first = replace(plain(0, "warm"), token_ids=(*HEAD, 1), stopping=Stopping(max_tokens=1))
        scheduler.admit(Sequence(first, list(first.token_ids), key=len(arrivals)))
        plan = scheduler.plan(0.0)
        while plan is not None:
            scheduler.commit(plan, checked.run(plan), 0.0)
            plan = scheduler.plan(0.0)
    found = {at: Answer() for at in range(len(arrivals))}
    steps, widest = 0, 0
    while coming or scheduler.live:
        for at, one in [pair for pair in coming if pair[1].step <= steps]:
            scheduler.admit(Sequence(one.request, list(one.request.token_ids), key=at))
            coming.remove((at, one))
        if steps in preempted_at:
            scheduler.set_batching(False)
        steps += 1
        plan = scheduler.plan(steps * 0.01)
        scheduler.set_batching(True)
        if plan is None:
            continue
        widest = max(widest, len(plan.rows))
        for event in scheduler.commit(plan, checked.run(plan), steps * 0.01):
            answer = found[event.key]
            answer.ids += event.token_ids
            answer.logprobs += event.logprobs
            answer.prompt_logprobs += event.prompt_logprobs
            answer.failure = event.failure
            answer.proposed += event.draft_proposed
            if event.start is not None:
                answer.cached_tokens = event.start.cached_tokens
            if event.finish is not None:
                answer.reason = event.finish.reason.value
    answers = {one.request.request_id: found[at] for at, one in enumerate(arrivals)}
    assert len(answers) == len(arrivals)
    return Mixed(answers, scheduler.load.preemptions, widest)


def close(ours: Items[TokenLogprob], theirs: Items[TokenLogprob], gap: float) -> bool:
    """Whether they say the same of the same places, to within `gap`. Ids of equally likely tokens may be swapped."""
    if len(ours) != len(theirs):
        return False
    return all(
        math.isclose(one.logprob, other.logprob, abs_tol=gap)
        and len(one.top) == len(other.top)
        and all(math.isclose(a, b, abs_tol=gap) for (_, a), (_, b) in zip(one.top, other.top, strict=True))
        for one, other in zip(ours, theirs, strict=True)
    )
