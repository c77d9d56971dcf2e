"""Sequences that go on in verifying launches: one alone, where a draft is expected to pay; several, where drafts give
each about as much as plain steps do, and all together more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.execution.pipeline import GROUPS, Pipeline, VerifiedDraft
from engine.execution.router import ALL_OPTIONS, NO_DRAFTS, Drafts, StepOptions, StepRows
from engine.execution.speculation.estimates import SOON, TRYING, AcceptanceEstimate, PaidDepths, can_verify
from engine.scheduling.plan import Row, RowResult, Share
from engine.scheduling.sequence_state import PerSequence, SequenceState, SequenceTable

STAYS = 64  # tokens without a draft: to come and go costs about a step each time
BEGINNING = 16  # tokens: most texts that repeat anything have done so by then
_MEMORY = 0.9  # of what a launch gave, after the next
_PRIOR = 2.0  # launches that the first estimate counts as
_MARGIN = 1.1  # how much faster all must be by the table to begin: the plain steps under way are lost
_OTHERS = 1.05  # how much slower one may be for the others' sake
_TO_GO = 32  # tokens that each must have before it
_FIRST_REST, _LAST_REST = 128, 512  # tokens in plain steps, once launches did not pay
_SEEN_REST = 32  # the first, where the host sees by itself what launches would give


class GroupPolicy(Protocol):
    """Decides whether verifying launches pay, and how long they should be."""

    def group(self, sequences: Items[SequenceState], *, continues: bool) -> int:
        """Returns each sequence's rows in the next launches; 0: plain steps. `continues`: they are in such launches."""

    def most(self, sequence: SequenceState) -> int:
        """Returns the longest draft that the sequence may ever have."""

    def observe(self, sequence: SequenceState, one: VerifiedDraft) -> None: ...


def group_of(depth: int) -> int:
    """Returns the rows of the shortest group that holds a draft of `depth` tokens."""
    return next(group for group in GROUPS if group > depth)


class SinglePolicy:
    """A `GroupPolicy` for one sequence."""

    def __init__(self, depths: PaidDepths, stays: int = STAYS, beginning: int = 0) -> None:
        """`stays`: tokens without a draft until the sequence goes back. `beginning`: first tokens of an answer that
        come in verifying launches with or without a draft."""
        self._stays = stays
        self._beginning = beginning
        self._depths = depths
        self._sequence: SequenceState | None = None  # that has gone over, or is about to
        self._until = 0  # its length at which it goes back

    def group(self, sequences: Items[SequenceState], *, continues: bool) -> int:
        (sequence,) = sequences
        if not self._depths.most(sequence):
            return 0
        length, depth = len(sequence.token_ids), self._depths.depth(sequence)
        if self._sequence is not sequence and sequence.output_length <= 1:
            self._sequence, self._until = sequence, length + self._beginning
        stays = continues or (self._sequence is sequence and length < self._until)
        if depth and (stays or self._depths.worth(sequence, depth)):
            self._sequence, self._until = sequence, length + self._stays
            return group_of(depth)
        if stays and length >= self._until:
            if self._depths.holds(sequence):
                return group_of(1)
            self._depths.left(sequence)
            return 0
        return int(stays)

    def most(self, sequence: SequenceState) -> int:
        return self._depths.most(sequence)

    def observe(self, sequence: SequenceState, one: VerifiedDraft) -> None:
        if one.proposed:
            self._depths.observe(sequence, one)


@dataclass(slots=True)
class LaunchRecord:
    """What verifying launches give a sequence, or would."""

    sequence: SequenceState
    tokens: float
    rest: int  # tokens, the next time
    launches: float = _PRIOR
    lost: float = 0.0  # seconds in launches against plain steps since it was furthest ahead of them
    fits: bool = False  # verifying launches can choose its tokens
    resumes_at: int = 0  # length of the sequence before which it has no launches

    @property
    def per_launch(self) -> float:
        return self.tokens / self.launches

    def add(self, tokens: int) -> None:
        self.tokens = self.tokens * _MEMORY + tokens
        self.launches = self.launches * _MEMORY + 1


class SeveralPolicy:
    """A `GroupPolicy` for a few sequences, whose launches all are of one group."""

    def __init__(
        self, group: int, seconds: float, plain: Callable[[int], float], estimate: AcceptanceEstimate, turn: float = 0.0
    ) -> None:
        """`seconds` of a launch, and `plain` of a plain step by its rows. `turn`: seconds for which sequences stand
        still when they change between the two."""
        self._group = group
        self._seconds = seconds
        self._plain = plain
        self._estimate = estimate
        self._turn = turn
        self._records = PerSequence(self._new_record)
        self._step = 0.0  # seconds of a plain step of those that were asked about last

    def group(self, sequences: Items[SequenceState], *, continues: bool) -> int:
        self._step = self._plain(len(sequences))
        if not self._may_pay():
            return 0
        records = [self._record(one) for one in sequences]
        if not all(record.fits for record in records):
            return 0
        if continues:
            if self._pays(records, 1.0) or self._holds(records):
                return self._group
            self._rest(records)
            return 0
        for record in records:
            self._observe_plain(record)
        if not all(self._ready(record) for record in records):
            return 0
        if self._pays(records, _MARGIN) and self._won_back(records):
            for record in records:
                record.lost = 0.0
            return self._group
        if self._estimate.tried:
            self._rest(records)
        return 0

    def most(self, sequence: SequenceState) -> int:
        most = self._group - 1
        return most if sequence.draft_limit is None else min(sequence.draft_limit, most)

    def observe(self, sequence: SequenceState, one: VerifiedDraft) -> None:
        record = self._record(sequence)
        record.add(1 + one.accepted)
        record.lost = max(0.0, record.lost + self._seconds - (1 + one.accepted) * self._step)
        self._estimate.observe(sequence, one)

    def _may_pay(self) -> bool:
        """Returns whether launches would pay if every draft were right."""
        return self._group * self._step >= self._seconds * _MARGIN

    def _pays(self, records: Items[LaunchRecord], margin: float) -> bool:
        plain, gains = self._step, [record.per_launch for record in records]
        faster = sum(gains) * plain > margin * len(records) * self._seconds
        return faster and min(gains) * plain * _OTHERS > self._seconds

    def _won_back(self, records: Items[LaunchRecord]) -> bool:
        """Returns whether the delay of a first launch is soon won back, or is short beside the steps so far."""
        gains = sum(record.per_launch for record in records) / len(records)
        plain, tokens = self._step, min(record.sequence.output_length for record in records)
        return self._switching(records) <= max(SOON * (plain - self._seconds / gains), TRYING * plain * tokens)

    def _holds(self, records: Items[LaunchRecord]) -> bool:
        """Returns whether each has lost less than it would by going back and coming again."""
        return max(record.lost for record in records) < self._switching(records)

    def _switching(self, records: Items[LaunchRecord]) -> float:
        """Returns the seconds to change to launches and back."""
        return self._estimate.behind([record.sequence for record in records]) + 2 * self._turn

    def _ready(self, record: LaunchRecord) -> bool:
        sequence = record.sequence
        to_go = sequence.stopping.max_tokens - sequence.output_length
        return to_go >= _TO_GO and len(sequence.token_ids) >= record.resumes_at

    def _rest(self, records: Items[LaunchRecord]) -> None:
        for record in records:
            sequence = record.sequence
            record.resumes_at = len(sequence.token_ids) + record.rest
            record.rest = min(2 * record.rest, _LAST_REST)
            if self._estimate.tried:
                record.tokens, record.launches = self._estimate.prior(sequence, self.most(sequence)) * _PRIOR, _PRIOR

    def _observe_plain(self, record: LaunchRecord) -> None:
        found = self._estimate.seen(record.sequence, self.most(record.sequence))
        if found is not None:
            record.add(found)

    def _record(self, sequence: SequenceState) -> LaunchRecord:
        record = self._records.of(sequence)
        record.fits = record.fits or can_verify(sequence)  # for good: what is counted before `min_tokens` only ends
        return record

    def _new_record(self, sequence: SequenceState) -> LaunchRecord:
        tokens = self._estimate.first(sequence, self.most(sequence)) * _PRIOR
        return LaunchRecord(sequence, tokens, _FIRST_REST if self._estimate.tried else _SEEN_REST)


class Way(NamedTuple):
    pipeline: Pipeline
    policy: GroupPolicy
    least_group: int = 1  # rows of a sequence in its shortest launch


class VerifyingRows:
    def __init__(self, ways: Mapping[int, Way], sequences: SequenceTable) -> None:
        """`ways` by the most sequences of each, fewest first. A share names its pipeline by that number."""
        self._ways = ways
        self._sequences = sequences

    def in_flight(self, rows: tuple[Row, ...]) -> dict[int, int]:
        return {row.key: most for most, way in self._ways.items() for row in way.pipeline.in_flight(rows)}

    def drafts(self, step: StepRows) -> Drafts:
        rows = step.decoding
        most = next((most for most in self._ways if most >= len(rows)), 0)
        if not most:
            return NO_DRAFTS
        pipeline, policy, _ = self._ways[most]
        continues = pipeline.continues(rows)
        group = policy.group([self._sequences.of(row) for row in rows], continues=continues)
        return Drafts(group, most, continues) if group else NO_DRAFTS

    def run(self, share: Share, options: StepOptions = ALL_OPTIONS) -> dict[int, RowResult]:
        pipeline, policy, least = self._ways[share.pipeline]
        of = self._sequences.of
        if share.drain:
            found = pipeline.drain(share.rows, options, least)
        else:
            most_drafts = [policy.most(of(row)) for row in share.rows]
            found = pipeline.step(share.rows, options, group=share.group, most_drafts=most_drafts)
        verified, pipeline.verified = pipeline.verified, []
        for sequence, one in verified:
            policy.observe(sequence, one)
        return found


def prefix_length(newest: int) -> int:
    """Returns how many tokens a draft model needs before a launch, whose first step feeds the last two."""
    return newest - 1


class DraftProgress:
    """Counts the first tokens of each sequence that the draft model's pages hold."""

    def __init__(self) -> None:
        self._computed = PerSequence(lambda sequence: [0], paged=True)

    def tokens(self, sequence: SequenceState) -> int:
        return self._computed.of(sequence)[0]

    def computed(self, sequence: SequenceState, until: int) -> None:
        count = self._computed.of(sequence)
        count[0] = max(count[0], until)

    def forget(self, sequence: SequenceState) -> None:
        self._computed.forget(sequence)
