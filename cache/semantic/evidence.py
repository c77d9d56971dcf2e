"""When observed answers allow a candidate to be served: a statistical bound on the error, which no caller meets alone.

A candidate's answer either would have done or not; that is one observation. With s right and f wrong, the share that is
right is Beta(s + 1, f + 1) distributed. Serving is allowed where that share exceeds 1 − δ with the configured
confidence: with none wrong, and δ = 1 % at 95 %, from 298 observations on.

Right ones count by caller, since harmless questions can be asked for the purpose: one caller is a quarter of them at
most. Wrong ones count all.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

SCHEMA = 1
CALLERS = 4  # that evidence must come from at least
MOST_CALLERS = 32  # whom a value names; later ones do not count
MOST = 1 << 20  # observations of one kind and caller
TAG_BYTES = 8  # of a caller's keyed digest


class _Raw(msgspec.Struct, array_like=True, frozen=True):
    schema: int
    wrong: int
    right: dict[bytes, int]


_DECODER = msgspec.msgpack.Decoder(_Raw)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was observed of one difference between questions, or of one entry."""

    right: dict[bytes, int] = field(default_factory=dict)  # by caller
    wrong: int = 0

    @property
    def counted(self) -> int:
        """Right ones, of which no caller's are more than 1/CALLERS of all that are counted."""
        return counted(self.right.values())

    def with_one(self, caller: bytes, right: bool) -> Evidence:
        """With one observation more."""
        if not right:
            return Evidence(self.right, min(self.wrong + 1, MOST))
        if caller not in self.right and len(self.right) >= MOST_CALLERS:
            return self
        return Evidence({**self.right, caller: min(self.right.get(caller, 0) + 1, MOST)}, self.wrong)

    def packed(self) -> bytes:
        """The stored value before it is sealed."""
        return msgspec.msgpack.encode(_Raw(SCHEMA, self.wrong, self.right))


def unpack_evidence(data: bytes) -> Evidence | None:
    """None where it is not evidence of this schema."""
    try:
        raw = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError):
        return None
    if raw.schema != SCHEMA or min((raw.wrong, *raw.right.values())) < 0 or len(raw.right) > MOST_CALLERS:
        return None
    return Evidence(raw.right, raw.wrong)


def counted(shares: Collection[int]) -> int:
    """The greatest total T to which each share adds T/CALLERS at most. 0 for fewer than CALLERS shares."""
    ordered = sorted(shares, reverse=True)
    # With the k greatest cut, T = k·T/CALLERS + the rest; cutting too few or too many gives more.
    return min(sum(ordered[cut:]) * CALLERS // (CALLERS - cut) for cut in range(CALLERS))


def chance_above(right: int, wrong: int, error: float) -> float:
    """The probability that the share of wrong answers is greater than `error`."""
    trials = right + wrong + 1
    # P(share right ≤ 1 − e) of a Beta(s + 1, f + 1) is a tail of a binomial: at most f of n + 1 are wrong.
    total = 0.0
    for count in range(wrong + 1):
        ways = math.lgamma(trials + 1) - math.lgamma(count + 1) - math.lgamma(trials - count + 1)
        total += math.exp(ways + count * math.log(error) + (trials - count) * math.log1p(-error))
    return min(total, 1.0)


def proven(evidence: Evidence, error: float, confidence: float) -> bool:
    """Whether the bound holds."""
    right, wrong = evidence.counted, evidence.wrong
    # Above twice the allowed share it cannot hold; the test bounds the length of the sum.
    return wrong <= 2 * error * (right + wrong) and chance_above(right, wrong, error) <= 1 - confidence


def refuted(evidence: Evidence, error: float, confidence: float) -> bool:
    """Whether the bound is broken, with the same confidence. Here every observation counts: this only takes away."""
    right, wrong = sum(evidence.right.values()), evidence.wrong
    if wrong == 0:
        return False
    return wrong > 50 + 2 * error * (right + wrong) or chance_above(right, wrong, error) >= confidence
