"""Runs rows in verifying launches: one sequence alone, or a few together. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

from engine.execution.pipeline import Pipeline, VerifiedDraft
from engine.execution.router import ALL_OPTIONS, NO_DRAFTS, Drafts, StepOptions, StepRows
from engine.scheduling.plan import Row, RowResult, Share
from engine.scheduling.sequence_state import PerSequence, SequenceState, SequenceTable


class GroupPolicy(Protocol):
    """Decides whether verifying launches pay, and how long they should be."""

    def group(self, sequences: Items[SequenceState], *, continues: bool) -> int:
        """Returns each sequence's rows in the next launches; 0: plain steps. `continues`: they are in such launches."""

    def most(self, sequence: SequenceState) -> int:
        """Returns the longest draft that the sequence may ever have."""

    def observe(self, sequence: SequenceState, one: VerifiedDraft) -> None: ...


class Way(NamedTuple):
    pipeline: Pipeline
    policy: GroupPolicy
    least_group: int = 1  # rows of a sequence in its shortest launch


class VerifyingRows:
    def __init__(self, ways: Mapping[int, Way], sequences: SequenceTable) -> None:
        """`ways` by the most sequences of each, fewest first. A share names its pipeline by that number."""
        self._ways = ways
        self._sequences = sequences

    @property
    def most_sequences(self) -> tuple[int, ...]:
        return tuple(self._ways)

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
