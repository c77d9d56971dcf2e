"""When the tokens of one answer came, and what that says: rate, gaps, use of the processor."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Answer:
    """One answer as its reader saw it. Times are seconds on one clock."""

    started: float  # when it was asked for
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens)
    cpu: float = 0.0  # seconds of processor time from the first arrival to the last, all processes that serve

    @property
    def tokens(self) -> int:
        """All that came."""
        return sum(count for _, count in self.arrivals)

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0][0] - self.started

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1][0] - self.arrivals[0][0]

    @property
    def rate(self) -> float:
        """Tokens a second after the first arrival."""
        return (self.tokens - self.arrivals[0][1]) / self.seconds

    def gaps(self) -> list[float]:
        """Seconds a token, for each token after the first arrival: those that came together share their gap."""
        found = []
        for (before, _), (at, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            found += [(at - before) / count] * count
        return found


def quantile(values: Sequence[float], share: float) -> float:
    """By nearest rank."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Of several answers to the same question."""
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


def first_tokens(times: Sequence[float]) -> dict[str, float]:
    """Milliseconds to the first token."""
    return {"ms_p50": round(statistics.median(times) * 1e3, 3), "ms_p95": round(quantile(times, 0.95) * 1e3, 3)}
