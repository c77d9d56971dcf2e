"""Which rows of a step go on in rounds, and in which: one sequence alone, or a few together. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from typing import NamedTuple, Protocol

from engine.execution.speculation.captured.rounds import Brought, RoundPipeline, RoundTold
from engine.scheduling.plan import Row, RowResult
from engine.scheduling.sequence_state import SequenceState, SequenceTable


class Chooser(Protocol):
    """Who says whether rounds pay, and how long they should be."""

    def group(self, sequences: Rows[SequenceState], *, continues: bool) -> int:
        """Rows of the next rounds for each of the sequences, all that decode; 0: they go on in plain steps.
        `continues`: they are in rounds already."""

    def most(self, sequence: SequenceState) -> int:
        """The longest draft that it may ever have."""

    def told(self, sequence: SequenceState, one: RoundTold) -> None:
        """What a round brought it."""


class Way(NamedTuple):
    """Rounds of so many sequences or fewer."""

    pipeline: RoundPipeline
    chooser: Chooser


class RoundRows:
    """Claims all rows that decode, or none, and does them. Where others join them, one leaves, or rounds no longer pay,
    rows come a last time for what is under way, so that nothing is computed twice."""

    def __init__(self, ways: Mapping[int, Way], sequences: SequenceTable) -> None:
        """`ways` by the most sequences of each, fewest first."""
        self._ways = ways
        self._sequences = sequences
        self._here: Way | None = None  # whose rounds may be under way
        self._group = 1  # rows of the next rounds for each sequence
        self._leaving = False  # the rows are brought what is under way for them, and no more
        self.enabled = True

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """All rows that decode, those of them that leave, or nothing."""
        mine = tuple(row for row in rows if row.count == 1 and row.sample)
        wanted = self._wanted(mine)
        leaving = self._held(mine, wanted)
        self._leaving = bool(leaving)
        if leaving:
            return leaving
        self._here = wanted
        return () if wanted is None else mine

    def run(self, rows: Rows[Row]) -> dict[int, RowResult]:
        """One id or several a row."""
        assert self._here is not None
        pipeline, chooser = self._here
        of = self._sequences.of
        if self._leaving:
            found = pipeline.drain(rows)
        else:
            found = pipeline.step(rows, self._group, [chooser.most(of(row)) for row in rows])
        for row in rows:
            for one in found[row.key].rounds:
                chooser.told(of(row), one)
        return {key: _result(brought) for key, brought in found.items()}

    def _wanted(self, mine: tuple[Row, ...]) -> Way | None:
        """The way in which they should go on; None is plain steps."""
        if not (self.enabled and mine):
            return None
        way = next((way for most, way in self._ways.items() if most >= len(mine)), None)
        if way is None:
            return None
        continues = way is self._here and way.pipeline.continues(mine)
        self._group = way.chooser.group([self._sequences.of(row) for row in mine], continues=continues)
        return way if self._group else None

    def _held(self, mine: tuple[Row, ...], wanted: Way | None) -> tuple[Row, ...]:
        """Those for which something is under way that they would lose by going on as wanted."""
        here = self._here
        if here is None or (here is wanted and here.pipeline.continues(mine)):
            return ()
        leaving = here.pipeline.holds(mine)
        if not leaving:
            here.pipeline.leave()
        return leaving


def _result(brought: Brought) -> RowResult:
    proposed, accepted = sum(one.proposed for one in brought.rounds), sum(one.accepted for one in brought.rounds)
    return RowResult(brought.token_ids, (), proposed, accepted)
