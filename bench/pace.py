"""Derives rates and gaps from the arrivals of one answer's tokens; and drives the engine's loop without its socket."""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.api import GREEDY, GenerationRequest, SamplingParams, Stopping
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from engine.execution.runner import ModelRunner  # torch, which not everybody who measures needs


@dataclass(slots=True)
class PacedAnswer:
    """One answer as its reader saw it. Times are seconds on one clock."""

    started: float  # when it was asked for
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens)
    cpu: float = 0.0  # seconds of processor time from the first arrival to the last, all processes that serve

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def first(self) -> float:
        return self.arrivals[0][0] - self.started

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.arrivals[-1][0] - self.arrivals[0][0]

    @property
    def rate(self) -> float:
        """Tokens a second after the first arrival."""
        return (self.tokens - self.arrivals[0][1]) / self.seconds

    def gaps(self) -> list[float]:
        """Seconds a token, for each token after the first arrival: tokens that arrive together share their gap."""
        found = []
        for (before, _), (at, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            found += [(at - before) / count] * count
        return found


def quantile(values: Items[float], share: float) -> float:
    """Returns the quantile by nearest rank."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def figures(answers: Items[PacedAnswer]) -> dict[str, float]:
    rates = [one.rate for one in answers]
    gaps = [gap for one in answers for gap in one.gaps()]
    return {
        "tokens_per_second": round(statistics.median(rates), 1),
        "spread": round((max(rates) - min(rates)) / statistics.median(rates), 4),
        "us_p50": round(quantile(gaps, 0.5) * 1e6, 1),
        "us_p95": round(quantile(gaps, 0.95) * 1e6, 1),
        "us_p99": round(quantile(gaps, 0.99) * 1e6, 1),
        "tokens_an_arrival": round(statistics.mean((one.tokens - 1) / (len(one.arrivals) - 1) for one in answers), 2),
        "cpu": round(sum(one.cpu for one in answers) / sum(one.seconds for one in answers), 2),
    }


def first_tokens(times: Items[float]) -> dict[str, float]:
    return {"ms_p50": round(statistics.median(times) * 1e3, 3), "ms_p95": round(quantile(times, 0.95) * 1e3, 3)}


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
    request = GenerationRequest(
        request_id=str(key),
        token_ids=prompt,
        sampling=sampling,
        stopping=Stopping(max_tokens=tokens),
        arrived_at=0.0,
    )
    return Sequence(request, list(prompt), key=key)
