"""Throttles background sequences beside interactive ones: a step feeds as many of them as lengthen it little.

Their number begins with none and doubles as long as fewer cost little. Throttled sequences keep slot and pages, and the
lowest ranks are fed first, so that they end and others follow. Their prompts get a short chunk now and then.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from engine.api import Priority
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.rank import rank
from engine.scheduling.sequence import Sequence

_LONGER = 1.25  # times as long as a step without them
_PROMPTS = 0.05  # of the time that steps without them take goes to their prompts
_CHUNK = 256  # tokens of those a step
_GUESSED = 4.0  # steps that a chunk is taken to last, before one was measured
_SETTLING = 2  # steps after a change of rows, which are not measured
_MEASURED = 4  # steps, before anything is known
_NEWEST = 0.2  # weight of the newest one
_ANEW = 1024  # steps after which everything is measured again


class _Sides(NamedTuple):
    """All lists begin with the lowest rank."""

    before: list[Sequence]  # which are not throttled
    decoding: list[Sequence]  # of those who yield
    prompts: list[Sequence]
    mixed: bool  # some of `before` rank behind some of the others


class _StepCost:
    __slots__ = ("seconds", "steps")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps = 0

    def learn(self, seconds: float) -> None:
        self.seconds = seconds if not self.steps else self.seconds + _NEWEST * (seconds - self.seconds)
        self.steps += 1

    @property
    def known(self) -> bool:
        return self.steps >= _MEASURED


class BackgroundThrottle:
    def __init__(self) -> None:
        self._costs: dict[int, _StepCost] = {}  # by rows of the background beside the others
        self._others = 0  # rows of those when they were measured
        self._chunk = 0.0  # seconds that one adds; 0: not measured yet
        self._since_chunk = 0.0  # seconds of steps
        self._steps = 0
        self._began: float | None = None  # the end of the step before
        self._fed = 0  # rows of the background in the step that is under way
        self._prompts = False  # one of its prompts is
        self._settling = _SETTLING
        self._known: tuple[int, _Sides | None] | None = None  # as of the last change; None: nothing is throttled

    def away(self) -> None:
        """The next step is not throttled, or its time means nothing."""
        self._began, self._settling = None, _SETTLING

    def choose(self, sequences: Items[Sequence], budget: int, changes: int | None) -> tuple[Items[Sequence], int]:
        """How many prompt tokens, and which of `sequences` (lowest rank first) to feed. A background sequence that by
        its wait ranks before an interactive one is not throttled. While `changes` is the same, so are `sequences`:
        examining hundreds takes as long as a step of a few."""
        if changes is None or self._known is None or self._known[0] != changes:
            self._known = -1 if changes is None else changes, _sides(sequences)
        sides = self._known[1]
        if sides is None:
            self.away()
            return sequences, budget
        self._adapt(len(sides.before))
        fed = sides.decoding[: self._allowed(len(sides.decoding))]
        self._settling = _SETTLING if len(fed) != self._fed else max(0, self._settling - 1)
        self._fed = len(fed)
        self._prompts = False
        if sides.prompts and self._spare() and all(_left(one) == 1 for one in sides.before):
            fed.append(sides.prompts[0])
            budget, self._prompts = min(budget, _CHUNK), True
            self._known = None  # it may decode after this step
        chosen = [*sides.before, *fed]
        if sides.mixed or self._prompts:
            chosen.sort(key=rank)
        return chosen, budget

    def ended(self, plan: StepPlan, result: StepResult, now: float) -> None:
        began, self._began = self._began, now
        if began is None or now <= began:
            return
        rows = [row for row in plan.rows if row.count == 1 and row.sample]
        tokens = sum(len(result.rows[row.key].token_ids) for row in rows)
        self._steps += 1
        self._since_chunk += now - began
        if not tokens:
            return
        seconds = (now - began) * len(rows) / tokens
        if self._prompts:
            self._since_chunk = 0.0
            usual = self._costs.get(self._fed)
            # A step may bring tokens of those that were launched before it.
            others = usual.seconds * tokens / len(rows) if usual is not None else 0.0
            self._chunk = max(now - began - others, 0.0)
            self._settling = _SETTLING
        elif len(rows) == len(plan.rows) and not self._settling:
            self._costs.setdefault(self._fed, _StepCost()).learn(seconds)

    def _adapt(self, others: int) -> None:
        if self._steps >= _ANEW or not others / 2 <= self._others <= 2 * others:
            self._steps, self._others = 0, others
            self._costs.clear()

    def _allowed(self, most: int) -> int:
        alone = self._alone()
        if not alone:
            return 0
        rows = 0
        while (more := max(1, 2 * rows)) <= most:
            cost = self._costs.get(more)
            if cost is None or not cost.known:
                return more
            if cost.seconds > _LONGER * alone:
                break
            rows = more
        return rows

    def _spare(self) -> bool:
        alone = self._alone()
        return alone > 0 and self._since_chunk * _PROMPTS >= (self._chunk or _GUESSED * alone)

    def _alone(self) -> float:
        """Seconds of a step without the background; 0 before one was measured. The least of all measurements counts:
        one without the background is too long where many rows, just fed, were still under way."""
        alone = self._costs.get(0)
        if alone is None or not alone.known:
            return 0.0
        return min(cost.seconds for cost in self._costs.values() if cost.known)


def _sides(sequences: Items[Sequence]) -> _Sides | None:
    """None where nothing is to be throttled."""
    ready = [one for one in sequences if not one.paused]
    last = max((at for at, one in enumerate(ready) if one.request.priority == Priority.INTERACTIVE), default=None)
    if last is None:
        return None
    before, decoding, prompts = ready[: last + 1], list[Sequence](), list[Sequence]()
    for one in ready[last + 1 :]:
        if one.request.priority != Priority.BACKGROUND:
            before.append(one)
        elif _left(one) == 1:
            decoding.append(one)
        else:
            prompts.append(one)
    if not decoding and not prompts:
        return None
    return _Sides(before, decoding, prompts, mixed=len(before) > last + 1)


def _left(sequence: Sequence) -> int:
    return len(sequence.token_ids) - sequence.computed
