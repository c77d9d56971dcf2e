"""When rounds are the way to go on: for the only row of a step that decodes, where a draft is expected to pay.
Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

from engine.execution.speculation.captured.rounds import GROUPS, RoundPipeline, RoundTold
from engine.scheduling.plan import Row, RowResult
from engine.scheduling.sequence_state import SequenceState, SequenceTable

PATIENCE = 64  # tokens: to come and go costs about a step each time


class Depths(Protocol):
    """Who says how long drafts should be."""

    def depth(self, sequence: SequenceState) -> int:
        """Tokens to draft next of a sequence that decodes alone."""

    def most(self, sequence: SequenceState) -> int:
        """The longest draft that it may ever have; 0 where rounds cannot serve it."""

    def told(self, sequence: SequenceState, one: RoundTold) -> None:
        """What came of a draft."""

    def worth(self, sequence: SequenceState, depth: int) -> bool:
        """Whether to begin rounds with drafts of `depth` tokens is worth what it costs."""

    def left(self, sequence: SequenceState) -> None:
        """It goes on in plain steps."""


def group_of(depth: int) -> int:
    """Rows of the shortest round that drafts so many tokens."""
    return next(group for group in GROUPS if group > depth)


class SingleRow:
    """Claims the row and does it. It keeps a row for a while in rounds without a draft, and delivers whatever is under
    way when it gives one up."""

    def __init__(
        self, pipeline: RoundPipeline, sequences: SequenceTable, depths: Depths, patience: int = PATIENCE
    ) -> None:
        """`patience`: tokens without a draft until the row goes back."""
        self._patience = patience
        self._pipeline = pipeline
        self._sequences = sequences
        self._depths = depths
        self._group = 1  # rows of the next rounds
        self._leaving = False  # the row is brought what is under way for it, and no more
        self._until = 0  # the length of the sequence at which it goes back
        self.enabled = True

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """The row, or nothing."""
        mine = tuple(row for row in rows if row.count == 1 and row.sample)
        self._leaving = False
        if self.enabled and len(mine) == 1 and self._wants(mine[0]):
            return mine
        leaving = tuple(row for row in mine if self._pipeline.holds(row))
        self._leaving = bool(leaving)
        if not leaving:
            self._pipeline.leave()
        return leaving

    def run(self, rows: Rows[Row]) -> dict[int, RowResult]:
        """One id or several."""
        (row,) = rows
        sequence = self._sequences.of(row)
        if self._leaving:
            found = self._pipeline.drain(row)
        else:
            found = self._pipeline.step(row, self._group, self._depths.most(sequence))
        told = self._pipeline.take_told()
        for one in told:
            if one.proposed:
                self._depths.told(sequence, one)
        proposed, accepted = sum(one.proposed for one in told), sum(one.accepted for one in told)
        return {row.key: RowResult(found.token_ids, (), proposed, accepted)}

    def _wants(self, row: Row) -> bool:
        """Whether rounds are the way to go on."""
        sequence = self._sequences.of(row)
        if not self._depths.most(sequence):
            return False
        depth, continues = self._depths.depth(sequence), self._pipeline.continues(row)
        self._group = group_of(depth)
        if self._group > 1 and (continues or self._depths.worth(sequence, depth)):
            self._until = len(sequence.token_ids) + self._patience
            return True
        if continues and len(sequence.token_ids) >= self._until:
            self._depths.left(sequence)
            return False
        return continues
