"""When observed answers allow a candidate to be served: a statistical bound on the error.

A candidate's answer either would have done or not; that is one observation, counted in its bucket of similarity. With
s right and f wrong, the share that is right is Beta(s + 1, f + 1) distributed. Serving is allowed where that share
exceeds 1 − δ with the configured confidence: with none wrong, and δ = 1 % at 95 %, from 298 observations on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

BUCKET = 0.02  # of cosine
STRICT = "strict"


def bucket(similarity: float) -> str:
    return f"{math.floor(min(similarity, 0.9999) / BUCKET):d}"


def label(name: str, right: bool) -> str:
    return f"{name}:{'right' if right else 'wrong'}"


def chance_above(right: int, wrong: int, error: float) -> float:
    """The probability that the share of wrong answers is greater than `error`."""
    trials = right + wrong + 1
    # P(share right ≤ 1 − e) of a Beta(s + 1, f + 1) is a tail of a binomial: at most f of n + 1 are wrong.
    total = 0.0
    for count in range(wrong + 1):
        ways = math.lgamma(trials + 1) - math.lgamma(count + 1) - math.lgamma(trials - count + 1)
        total += math.exp(ways + count * math.log(error) + (trials - count) * math.log1p(-error))
    return min(total, 1.0)


def proven(counts: Mapping[str, int], name: str, error: float, confidence: float) -> bool:
    """Whether the bound holds in that bucket."""
    right, wrong = counts.get(label(name, True), 0), counts.get(label(name, False), 0)
    # Above twice the allowed share it cannot hold; the test bounds the length of the sum.
    return wrong <= 2 * error * (right + wrong) and chance_above(right, wrong, error) <= 1 - confidence


def refuted(counts: Mapping[str, int], name: str, error: float, confidence: float) -> bool:
    """Whether the bound is broken in that bucket, with the same confidence."""
    right, wrong = counts.get(label(name, True), 0), counts.get(label(name, False), 0)
    if wrong == 0:
        return False
    return wrong > 50 + 2 * error * (right + wrong) or chance_above(right, wrong, error) >= confidence


def wrongs(counts: Mapping[str, int]) -> int:
    return sum(count for name, count in counts.items() if name.endswith(":wrong"))
