"""When rounds are the way to go on: for the only row of a step that decodes, where a draft is expected to pay.
Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

from engine.execution.speculation.captured.rounds import GROUPS, RoundPipeline, RoundTold
from engine.scheduling.plan import Row, RowResult
from engine.scheduling.sequence_state import SequenceState, SequenceTable

IN_VAIN = 4  # rounds in which nothing was proposed, one after the other, before the row goes back


class Depths(Protocol):
    """Who says how long drafts should be."""

    def depth(self, sequence: SequenceState) -> int:
        """Tokens to draft of a sequence that decodes alone; 0: none, or the sequence must not have any."""

    def told(self, sequence: SequenceState, one: RoundTold) -> None:
        """What came of a draft."""


def group_of(depth: int) -> int:
    """Rows of the longest round that drafts so many tokens, or fewer."""
    return max(group for group in GROUPS if group <= depth + 1)


class SingleRow:
    """Claims the row and does it. Whatever is under way when it gives a row up is delivered before."""

    def __init__(self, pipeline: RoundPipeline, sequences: SequenceTable, depths: Depths) -> None:
        self._pipeline = pipeline
        self._sequences = sequences
        self._depths = depths
        self._group = 1  # of the row claimed last
        self._leaving = False  # it is brought what is under way for it, and no more
        self._in_vain = 0  # rounds
        self.enabled = True

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """The row, or nothing."""
        mine = tuple(row for row in rows if row.count == 1 and row.sample)
        self._leaving = False
        self._group = self._wanted(mine)
        if self._group > 1:
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
        found = self._pipeline.drain(row) if self._leaving else self._pipeline.step(row, self._group)
        for one in self._pipeline.take_told():
            self._in_vain = 0 if one.proposed else self._in_vain + 1
            self._depths.told(sequence, one)
        return {row.key: found}

    def _wanted(self, rows: tuple[Row, ...]) -> int:
        """Rows of the next rounds; 1: rounds are not the way."""
        if not self.enabled or len(rows) != 1:
            return 1
        if self._in_vain >= IN_VAIN:
            self._in_vain = 0
            return 1
        return group_of(self._depths.depth(self._sequences.of(rows[0])))
