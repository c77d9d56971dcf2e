"""Decides when observed answers allow a candidate to be served: by a bound on its error rate and limits on its pace.

With s right and f wrong observations, the share of right answers is Beta(s + 1, f + 1) distributed. Serving is allowed
if that share exceeds 1 − δ with the configured confidence: with no wrong observation, δ = 1 % and 95 % confidence, this
takes 298 observations.

An attacker can gather evidence by harmless questions, under as many callers as a tenant has tokens. So one caller makes
up at most a quarter of the right observations, those that count per day and their new callers are limited, and a day
must lie between the first and the last. Every wrong observation counts, at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import msgspec

SCHEMA = 2
CALLERS = 4  # the fewest callers that evidence must come from
MOST_CALLERS = 32  # the most callers that a stored value names; later callers do not count
MOST = 1 << 20  # the most observations counted for one caller, or counted as wrong
TAG_BYTES = 8  # bytes kept of a caller's keyed digest
DAY = 86_400  # seconds
AGE = DAY  # the fewest seconds between the first right observation and the last
RIGHT_A_DAY = 100  # the most right observations of one difference that count per day
CALLERS_A_DAY = 2  # the most new callers whose observations of one difference count per day
TENANT_A_DAY = 1000  # the most right observations that count per tenant and day


class _RawEvidence(msgspec.Struct, array_like=True, frozen=True):
    schema: int
    wrong: int
    right: dict[bytes, int]
    first: int
    last: int
    today: int
    new: int


class _RawDay(msgspec.Struct, array_like=True, frozen=True):
    schema: int
    day: int
    counted: int


_DECODER = msgspec.msgpack.Decoder(_RawEvidence)
_DAY_DECODER = msgspec.msgpack.Decoder(_RawDay)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Times are Unix times in seconds."""

    right: dict[bytes, int] = field(default_factory=dict)  # caller → right observations
    wrong: int = 0
    first: int = 0  # time of the first right observation that counted
    last: int = 0  # time of the last one
    today: int = 0  # right observations on the day of `last`
    new: int = 0  # callers first observed on that day

    @property
    def counted(self) -> int:
        """Each caller's observations are capped at 1/CALLERS of the result."""
        return counted(self.right.values())

    def with_one(self, caller: bytes, right: bool) -> Evidence:
        """Ignores the limits per day: for evidence that can only stop an answer from being served."""
        if not right:
            return replace(self, wrong=min(self.wrong + 1, MOST))
        if caller not in self.right and len(self.right) >= MOST_CALLERS:
            return self
        return replace(self, right={**self.right, caller: min(self.right.get(caller, 0) + 1, MOST)})

    def with_right(self, caller: bytes, now: float) -> Evidence:
        """Returns itself if the day's limit is reached or `now` lies on a day before `last`."""
        second = int(now)
        same_day = bool(self.right) and second // DAY == self.last // DAY
        today, new = (self.today, self.new) if same_day else (0, 0)
        more = self.with_one(caller, right=True)
        new += caller not in self.right
        late = bool(self.right) and second // DAY < self.last // DAY
        if late or more is self or today >= RIGHT_A_DAY or new > CALLERS_A_DAY:
            return self
        first = self.first if self.right else second
        return replace(more, first=min(first, second), last=max(self.last, second), today=today + 1, new=new)

    def packed(self) -> bytes:
        return msgspec.msgpack.encode(
            _RawEvidence(SCHEMA, self.wrong, self.right, self.first, self.last, self.today, self.new)
        )


def unpack_evidence(data: bytes) -> Evidence | None:
    try:
        raw = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError):
        return None
    numbers = (raw.wrong, raw.first, raw.last - raw.first, raw.today, raw.new, *raw.right.values())
    if raw.schema != SCHEMA or min(numbers) < 0 or len(raw.right) > MOST_CALLERS:
        return None
    return Evidence(raw.right, raw.wrong, raw.first, raw.last, raw.today, raw.new)


@dataclass(frozen=True, slots=True)
class TenantDay:
    day: int = 0
    counted: int = 0

    def with_one(self, now: float) -> TenantDay | None:
        day = int(now) // DAY
        if day > self.day:
            return TenantDay(day, 1)
        return TenantDay(day, self.counted + 1) if day == self.day and self.counted < TENANT_A_DAY else None

    def packed(self) -> bytes:
        return msgspec.msgpack.encode(_RawDay(SCHEMA, self.day, self.counted))


def unpack_day(data: bytes) -> TenantDay | None:
    try:
        raw = _DAY_DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError):
        return None
    return TenantDay(raw.day, raw.counted) if raw.schema == SCHEMA and min(raw.day, raw.counted) >= 0 else None


def counted(shares: Collection[int]) -> int:
    """The greatest total T to which each share adds T/CALLERS at most; 0 for fewer than CALLERS shares."""
    ordered = sorted(shares, reverse=True)
    # With the k greatest cut, T = k·T/CALLERS + the rest; cutting too few or too many gives more.
    return min(sum(ordered[cut:]) * CALLERS // (CALLERS - cut) for cut in range(CALLERS))


def chance_above(right: int, wrong: int, error: float) -> float:
    trials = right + wrong + 1
    # P(share right ≤ 1 − e) of a Beta(s + 1, f + 1) is a tail of a binomial: at most f of n + 1 are wrong.
    total = 0.0
    for count in range(wrong + 1):
        ways = math.lgamma(trials + 1) - math.lgamma(count + 1) - math.lgamma(trials - count + 1)
        total += math.exp(ways + count * math.log(error) + (trials - count) * math.log1p(-error))
    return min(total, 1.0)


def proven(evidence: Evidence, error: float, confidence: float) -> bool:
    """Whether the bound on the error holds, over at least AGE seconds."""
    if evidence.last - evidence.first < AGE:
        return False
    right, wrong = evidence.counted, evidence.wrong
    # The bound cannot hold above twice the allowed share; this comparison also bounds the length of the sum.
    return wrong <= 2 * error * (right + wrong) and chance_above(right, wrong, error) <= 1 - confidence


def refuted(evidence: Evidence, error: float, confidence: float) -> bool:
    """Whether the bound is broken with the same confidence. Every observation counts: this only takes away."""
    right, wrong = sum(evidence.right.values()), evidence.wrong
    if wrong == 0:
        return False
    return wrong > 50 + 2 * error * (right + wrong) or chance_above(right, wrong, error) >= confidence
