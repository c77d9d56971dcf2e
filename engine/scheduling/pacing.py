"""Bounds running sequences and prompt tokens so that a stream's tokens are no further apart than a target; idle without
one.

Step times are learnt by the number of decoding rows, and by what prompt tokens add. Rows may take most of the target,
prompts the rest. More sequences start only while steps are well below that, fewer once they are above it. Running ones
go on: feeding them by turns would give each of them fewer tokens.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.sequence import Sequence

_ROWS = 0.8  # of the target that rows may take
_GROW, _SHRINK = 0.7, 0.9  # of the target: below the one more may run, above the other fewer
_FIRST = 4  # rows before any step was measured
_FASTER = 4  # times as many rows at once, at most
_STEPS = 4  # measured between two changes of the bound
_NEWEST = 0.2  # weight of the newest step
_LEAST = 64  # prompt tokens of a step
_TRICKLE = 0.05  # of the target that is saved for prompts in a step without any
_BUCKETS = 2  # of sizes, from one to its double


class StepCosts:
    """Smoothed seconds by size; near sizes share an entry."""

    def __init__(self, rising: float) -> None:
        self._rising = rising  # how a size that was not measured yet is predicted: 1 as sizes do, 0 not at all
        self._known: dict[int, float] = {}  # by bucket

    def of(self, size: int) -> float | None:
        """None before any was measured."""
        if not size:
            return 0.0
        if not self._known:
            return None
        bucket = _bucket(size)
        nearest = min(self._known, key=lambda known: abs(known - bucket))
        return self._known[nearest] * float(2.0 ** (self._rising * (bucket - nearest) / _BUCKETS))

    def learn(self, size: int, seconds: float) -> None:
        bucket = _bucket(size)
        known = self._known.get(bucket, seconds)
        self._known[bucket] = known + _NEWEST * (seconds - known)


def _bucket(size: int) -> int:
    return math.ceil(math.log2(size) * _BUCKETS)


class Pacing:
    def __init__(self, target: float | None, most_rows: int) -> None:
        self._target = target  # seconds between two tokens of a stream
        self._most = most_rows
        self._rows = float(most_rows if target is None else min(_FIRST, most_rows))
        self._of_rows = StepCosts(rising=0.0)  # a token of each
        self._of_prompts = StepCosts(rising=1.0)
        self._running = 0  # sequences, when the step was planned
        self._measured = 0  # steps since the bound was changed
        self._saved = 0.0  # seconds
        self._began: float | None = None  # the end of the step before, or the plan; None: nothing was fed

    @property
    def rows(self) -> int:
        return int(self._rows)

    def prompt_tokens(self, running: Collection[Sequence], most: int) -> int:
        """How many prompt tokens, of `most`, fit beside decoding sequences."""
        if self._target is None:
            return most
        left = [len(one.token_ids) - one.computed for one in running if not one.paused]
        self._running, rows = len(left), left.count(1)
        taken = self._of_rows.of(rows)
        if not rows or taken is None:
            return most
        room = self._target - taken
        if (self._of_prompts.of(_LEAST) or 0.0) > room:
            room += self._saved
        tokens = 0
        while 2 * tokens <= most and (self._of_prompts.of(max(2 * tokens, _LEAST)) or 0.0) <= room:
            tokens = max(2 * tokens, _LEAST)
        return min(tokens, most)

    def begin(self, now: float) -> None:
        if self._began is None:
            self._began = now

    def idle(self) -> None:
        """Discards the measurement: nothing can be fed, or a step failed."""
        self._began = None

    def ended(self, plan: StepPlan, result: StepResult, now: float) -> None:
        began, self._began = self._began, now
        if self._target is None or began is None or now <= began:
            return
        decoded = [row for row in plan.rows if row.count == 1 and row.sample]
        rows, fed = len(decoded), sum(row.count for row in plan.rows) - len(decoded)
        tokens = sum(len(result.rows[row.key].token_ids) for row in decoded)
        if rows and not tokens:
            return
        self._learn(rows, tokens / rows if rows else 1.0, fed, now - began)
        if rows:
            self._save(self._target * tokens / rows - (now - began), fed)
            self._bound(self._of_rows.of(rows) or 0.0, self._target)

    def _save(self, seconds: float, fed: int) -> None:
        """Saves time left of the target, and at least a little, for prompts whose least chunk would not fit into a
        step."""
        assert self._target is not None
        most = max(self._target, self._of_prompts.of(_LEAST) or 0.0)
        if not fed:
            seconds = max(seconds, _TRICKLE * self._target)
        self._saved = min(max(self._saved + seconds, -self._target), most)

    def _learn(self, rows: int, tokens: float, fed: int, seconds: float) -> None:
        """Rows have `tokens` each, beside prompts. Divides the deviation in the prediction's proportions."""
        of_rows, of_prompts = self._of_rows.of(rows), self._of_prompts.of(fed)
        if of_rows is None:
            of_rows = max(seconds - (of_prompts or 0.0), 0.0) / tokens
        if of_prompts is None:
            of_prompts = max(seconds - of_rows * tokens, 0.0)
        predicted = of_rows * tokens + of_prompts
        share = seconds / predicted if predicted > 0 else 1.0
        if rows:
            self._of_rows.learn(rows, of_rows * share)
        if fed:
            self._of_prompts.learn(fed, of_prompts * share)

    def _bound(self, taken: float, target: float) -> None:
        self._measured += 1
        if self._measured < _STEPS or taken <= 0:
            return
        running, bound = self._running, self.rows
        fitting = running * _ROWS * target / taken
        if taken > _SHRINK * target and running <= bound:
            self._change(fitting)
        elif taken < _GROW * target and running >= bound:
            self._change(min(max(fitting, running + 1), _FASTER * running))

    def _change(self, rows: float) -> None:
        self._rows = min(max(rows, 1.0), float(self._most))
        self._measured = 0
