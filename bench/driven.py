"""The engine without its socket, as benches drive it: what they ask, and who plans."""

from __future__ import annotations

from engine.api import GREEDY, GenerationRequest, SamplingParams, Stopping
from engine.execution.runner import ModelRunner
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence

CHUNK = 512  # prompt tokens a step


def planner(runner: ModelRunner, pool: PagePool, budget: int = CHUNK) -> Scheduler:
    """Plans for this runner, `budget` prompt tokens a step, without shared prefixes."""
    info = runner.info
    limits = Limits(
        max_sequences=info.max_sequences,
        max_batch_tokens=budget,
        max_context=info.max_context,
        lookahead_tokens=info.lookahead_tokens,
        max_tokens_per_row=info.max_tokens_per_row,
    )
    return Scheduler(limits, pool)


def asked(key: int, prompt: tuple[int, ...], tokens: int, sampling: SamplingParams = GREEDY) -> Sequence:
    """A request for so many tokens."""
    request = GenerationRequest(
        request_id=str(key),
        token_ids=prompt,
        sampling=sampling,
        stopping=Stopping(max_tokens=tokens),
        arrived_at=0.0,
    )
    return Sequence(request, list(prompt), key=key)
