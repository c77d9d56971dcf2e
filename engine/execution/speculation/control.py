"""Decides how many tokens are drafted for whom: those that make the step's tokens a second most, by what was accepted
so far and what a wider step costs. Nothing here can change an answer."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from engine.execution.speculation.costs import Costs
from engine.execution.speculation.proposer import Proposer
from engine.scheduling.sequence_state import PerSequence, SequenceState

PRIOR = (1.5, 2.0)  # accepted of tried, before anything was: a new sequence is worth a try
_MEMORY = 0.9  # of what a draft showed, after the next
_LONG_MEMORY = 0.995  # of what it showed of a proposer
_MARGIN = 1.04  # how much faster it must be by the table, which is not exact
_OTHERS = 1.05  # how much longer a step may be by the table for those that have no draft; by the clock up to twice that
_FIRST_REST, _LAST_REST = 8, 512  # tokens until it is tried again
_TURN = 64  # tokens after which another proposer is tried on a sequence


class Candidate(NamedTuple):
    sequence: SequenceState
    proposer: Proposer
    most: int  # tokens of a draft, at least 1


@dataclass(slots=True)
class Tally:
    """Counts how often drafted tokens were right, the latest most."""

    accepted: float = PRIOR[0]
    tried: float = PRIOR[1]

    @property
    def rate(self) -> float:
        """Returns the probability that a drafted token is accepted if all before it were."""
        return self.accepted / self.tried

    def add(self, proposed: int, accepted: int, memory: float) -> None:
        """`memory`: the weight of what was observed before."""
        self.tried = self.tried * memory + accepted + (accepted < proposed)
        self.accepted = self.accepted * memory + accepted


@dataclass(slots=True)
class DraftRecord:
    tally: Tally
    rest: int = 0  # tokens that it rests for, once it does not pay
    resumes_at: int = 0  # length of the sequence at which it is tried again
    probing: bool = False
    chosen_at: int = 0  # length of the sequence when the proposer was last chosen for it


class Control:
    def __init__(self, costs: Costs, *, learns: bool = False) -> None:
        """`learns`: no more is expected of a new sequence than earlier ones gave."""
        self._costs = costs
        self._learns = learns
        self._records: dict[str, PerSequence[DraftRecord]] = {}  # by proposer
        self._usual: dict[str, Tally] = {}  # of all sequences, by proposer

    def depths(self, candidates: Items[Candidate], rows: int, tokens: int) -> list[int]:
        """The step feeds `tokens` in `rows` rows without drafts."""
        records = [self._record(one) for one in candidates]
        depths = self._best(candidates, records, rows, tokens)
        for at, (one, record) in enumerate(zip(candidates, records, strict=True)):
            record.probing = False
            if depths[at]:
                record.rest = 0
            elif self._may_probe(one, record, rows, tokens):
                depths[at], record.probing = 1, True
        return depths

    def observe(self, one: Candidate, proposed: int, accepted: int) -> None:
        record = self._record(one)
        record.tally.add(proposed, accepted, _MEMORY)
        if self._learns:
            self._usual.setdefault(one.proposer.name, Tally()).add(proposed, accepted, _LONG_MEMORY)
        if record.probing and not accepted:
            record.rest = min(2 * record.rest, _LAST_REST)
            record.resumes_at = len(one.sequence.token_ids) + record.rest

    def choose(self, found: Items[Candidate], rows: int, tokens: int) -> Candidate:
        """Chooses the best proposer for one sequence, or one not chosen for long, since what a text repeats changes."""
        length = len(found[0].sequence.token_ids)
        chosen = found[0]
        if len(found) > 1:
            chosen = max(found, key=lambda one: self._tokens_a_second(one, rows, tokens))
            for one in found:
                record = self._record(one)
                if length - max(record.chosen_at, one.sequence.prompt_length) >= max(_TURN, record.rest):
                    chosen = one
        self._record(chosen).chosen_at = length
        return chosen

    def _tokens_a_second(self, one: Candidate, rows: int, tokens: int) -> float:
        """Assumes that this sequence alone has a draft, of the best length."""
        return max(rows / self._costs.seconds(tokens), *self._rates(one, self._record(one).tally.rate, rows, tokens))

    def _rates(self, one: Candidate, rate: float, rows: int, tokens: int) -> list[float]:
        """Returns the tokens a second of a step with a draft of this sequence alone, for drafts of 1, 2, … tokens."""
        found, expected, gain = [], float(rows), rate
        for depth in range(1, 1 + one.most):
            expected += gain
            gain *= rate
            found.append(expected / (self._costs.seconds(tokens + depth) + one.proposer.seconds(1, depth)))
        return found

    def rate(self, one: Candidate) -> float:
        return self._record(one).tally.rate

    def _record(self, one: Candidate) -> DraftRecord:
        name = one.proposer.name
        records = self._records.get(name)
        if records is None:
            records = self._records[name] = PerSequence(lambda sequence: self._new_record(name))
        return records.of(one.sequence)

    def _new_record(self, proposer: str) -> DraftRecord:
        tally, usual = Tally(), self._usual.get(proposer, Tally())
        tally.accepted = tally.tried * min(tally.rate, usual.rate)
        return DraftRecord(tally)

    def _best(self, candidates: Items[Candidate], records: Items[DraftRecord], rows: int, tokens: int) -> list[int]:
        """Lengthens drafts by the likeliest token each time. Returns the best depths on the way."""
        if rows == len(candidates) == 1:
            rates = self._rates(candidates[0], records[0].tally.rate, rows, tokens)
            best = max(rates)
            return [1 + rates.index(best) if best > _MARGIN / self._costs.seconds(tokens) else 0]
        depths = [0] * len(candidates)
        gains = [record.tally.rate for record in records]  # of the next token of each
        plain = self._costs.seconds(tokens)
        best, found, expected = rows / plain * _MARGIN, list(depths), float(rows)
        while True:
            at = max(
                (at for at, one in enumerate(candidates) if depths[at] < one.most), key=gains.__getitem__, default=None
            )
            if at is None:
                return found
            depths[at] += 1
            expected += gains[at]
            gains[at] *= records[at].tally.rate
            seconds = self._seconds(candidates, depths, tokens)
            if len(candidates) < rows and seconds > plain * _OTHERS:
                return found  # the others would wait too long, and for longer drafts no less
            drafted = sum(depth > 0 for depth in depths)
            if expected / seconds > best and (drafted == rows or seconds <= plain * _OTHERS):
                best, found = expected / seconds, list(depths)

    def _seconds(self, candidates: Items[Candidate], depths: Items[int], tokens: int) -> float:
        seconds = self._costs.seconds(tokens + sum(depths))
        for proposer in {id(one.proposer): one.proposer for one in candidates}.values():
            asked = [depth for one, depth in zip(candidates, depths, strict=True) if one.proposer is proposer and depth]
            if asked:
                seconds += proposer.seconds(len(asked), max(asked))
        return seconds

    def _may_probe(self, one: Candidate, record: DraftRecord, rows: int, tokens: int) -> bool:
        """Returns whether to try one token where drafts seem not to pay: not where even a sure one would not."""
        if not record.rest:
            record.rest, record.resumes_at = _FIRST_REST, len(one.sequence.token_ids) + _FIRST_REST
        if len(one.sequence.token_ids) < record.resumes_at:
            return False
        sure = self._costs.seconds(tokens + 1) + one.proposer.seconds(1, 1)
        plain = self._costs.seconds(tokens)
        return (rows + 1) / sure > rows / plain * _MARGIN and (rows == 1 or sure <= plain * _OTHERS)
