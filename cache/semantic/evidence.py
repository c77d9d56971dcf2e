"""When observed answers allow a candidate to be served: a statistical bound on the error, and bounds on how soon.

A candidate's answer either would have done or not; that is one observation. With s right and f wrong, the share that is
right is Beta(s + 1, f + 1) distributed. Serving is allowed where that share exceeds 1 − δ with the configured
confidence: with none wrong, and δ = 1 % at 95 %, from 298 observations on.

Harmless questions can be asked for the purpose, by as many callers as a tenant has tokens. So right observations count
by caller, one of whom is a quarter at most; of a day only so many count, and of new callers only so many; and the first
must be old. Wrong ones count all, and at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import msgspec

SCHEMA = 2
CALLERS = 4  # that evidence must come from at least
MOST_CALLERS = 32  # whom a value names; later ones do not count
MOST = 1 << 20  # observations of one kind and caller
TAG_BYTES = 8  # of a caller's keyed digest
DAY = 86_400  # seconds
AGE = DAY  # seconds between the first right observation and the last
RIGHT_A_DAY = 100  # observations of one difference that count
CALLERS_A_DAY = 2  # whose first observation of one difference counts
TENANT_A_DAY = 1000  # observations of all differences of a tenant that count


class _Raw(msgspec.Struct, array_like=True, frozen=True):
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


_DECODER = msgspec.msgpack.Decoder(_Raw)
_DAY_DECODER = msgspec.msgpack.Decoder(_RawDay)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was observed of one difference between questions, or of one entry. Times are whole seconds since 1970."""

    right: dict[bytes, int] = field(default_factory=dict)  # by caller
    wrong: int = 0
    first: int = 0  # right observation that counted
    last: int = 0
    today: int = 0  # right observations of the last one's day
    new: int = 0  # callers of that day who are new

    @property
    def counted(self) -> int:
        """Right ones, of which no caller's are more than 1/CALLERS of all that are counted."""
        return counted(self.right.values())

    def with_one(self, caller: bytes, right: bool) -> Evidence:
        """With one observation more, whenever it was made: for what only takes away."""
        if not right:
            return replace(self, wrong=min(self.wrong + 1, MOST))
        if caller not in self.right and len(self.right) >= MOST_CALLERS:
            return self
        return replace(self, right={**self.right, caller: min(self.right.get(caller, 0) + 1, MOST)})

    def with_right(self, caller: bytes, now: float) -> Evidence:
        """With one right observation more; the same where it does not count, as where the clock went back a day."""
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
        """The stored value before it is sealed."""
        return msgspec.msgpack.encode(_Raw(SCHEMA, self.wrong, self.right, self.first, self.last, self.today, self.new))


def unpack_evidence(data: bytes) -> Evidence | None:
    """None where it is not evidence of this schema."""
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
    """How many right observations of a tenant count on a day, of all differences together."""

    day: int = 0
    counted: int = 0

    def with_one(self, now: float) -> TenantDay | None:
        """None where no more count today, or the clock went back."""
        day = int(now) // DAY
        if day > self.day:
            return TenantDay(day, 1)
        return TenantDay(day, self.counted + 1) if day == self.day and self.counted < TENANT_A_DAY else None

    def packed(self) -> bytes:
        """The stored value before it is sealed."""
        return msgspec.msgpack.encode(_RawDay(SCHEMA, self.day, self.counted))


def unpack_day(data: bytes) -> TenantDay | None:
    """None where it is not a day of this schema."""
    try:
        raw = _DAY_DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError):
        return None
    return TenantDay(raw.day, raw.counted) if raw.schema == SCHEMA and min(raw.day, raw.counted) >= 0 else None


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
    """Whether the bound holds, and the evidence is old enough."""
    if evidence.last - evidence.first < AGE:
        return False
    right, wrong = evidence.counted, evidence.wrong
    # Above twice the allowed share it cannot hold; the test bounds the length of the sum.
    return wrong <= 2 * error * (right + wrong) and chance_above(right, wrong, error) <= 1 - confidence


def refuted(evidence: Evidence, error: float, confidence: float) -> bool:
    """Whether the bound is broken, with the same confidence. Here every observation counts: this only takes away."""
    right, wrong = sum(evidence.right.values()), evidence.wrong
    if wrong == 0:
        return False
    return wrong > 50 + 2 * error * (right + wrong) or chance_above(right, wrong, error) >= confidence
