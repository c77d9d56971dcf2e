"""More rows than one pipeline holds: two pipelines share them, and their steps take turns on the device, or another
executor takes over. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows

from engine.execution.graph_decode.pipeline import AHEAD, BUCKETS, DecodePipeline
from engine.scheduling.plan import Row, RowResult
from engine.scheduling.sequence_state import SequenceState, SequenceTable

MOST_PIPELINES = 2
AHEAD_IN_TURN = 2  # steps that a pipeline launches before it lets the other, which waits for as many


class AlternatingPipelines:
    """Up to eight rows are the first pipeline's. Of more, `others` says which another executor takes; of the rest each
    stays with the pipeline that has it."""

    def __init__(
        self,
        pipelines: Rows[DecodePipeline],
        sequences: SequenceTable,
        others: Callable[[SequenceState], bool] | None = None,
    ) -> None:
        self._pipelines = tuple(pipelines)
        self._sequences = sequences
        self._others = others
        self._homes: dict[int, int] = {}  # key of a row → index of its pipeline
        self._leaving = False  # the rows claimed last are brought what is under way for them, and no more
        self._alone = True  # all rows of the step are its own

    @property
    def most_rows(self) -> int:
        """Rows that it can step at once."""
        return len(self._pipelines) * BUCKETS[-1]

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Those of the rows that `step` is to do. Once there are too many, rows come a last time for what is under way,
        so that nothing is computed twice when another executor takes them over."""
        was_alone, self._leaving = self._alone, False
        self._alone = self._others is None or len(rows) <= BUCKETS[-1]
        if not self._alone and self._others is not None:
            leaving = tuple(self._under_way(rows)) if was_alone else ()
            if leaving:
                self._leaving = True
                return leaving
            of, others = self._sequences.of, self._others
            rows = tuple(row for row in rows if not others(of(row)))
        return rows if len(rows) <= self.most_rows else ()

    def _under_way(self, rows: Rows[Row]) -> list[Row]:
        return [row for pipeline in self._pipelines for row in pipeline.under_way(rows)]

    def hand_over(self, rows: Rows[Row]) -> dict[int, RowResult]:
        """See `sharing.HandingOver`: of as many rows as one pipeline has."""
        first = self._pipelines[0]
        return first.drain(rows) if len(rows) <= BUCKETS[-1] and first.under_way(rows) else {}

    def step(self, rows: Rows[Row], *, further: bool = True) -> dict[int, RowResult]:
        """At least one id for each row, and whatever else has come. See `DecodePipeline.step`."""
        found: dict[int, RowResult] = {}
        if self._leaving:
            for pipeline in self._pipelines:
                found |= pipeline.drain(pipeline.under_way(rows))
            return found
        self._homes = self._assign(rows)
        ahead = AHEAD if self._alone and len(rows) <= BUCKETS[-1] else AHEAD_IN_TURN
        for index, pipeline in enumerate(self._pipelines):
            share = [row for row in rows if self._homes[row.key] == index]
            if share:
                found |= pipeline.step(share, ahead, further=further)
            else:
                pipeline.leave()
        return found

    def _assign(self, rows: Rows[Row]) -> dict[int, int]:
        keys = [row.key for row in rows]
        if len(rows) <= BUCKETS[-1]:
            return dict.fromkeys(keys, 0)
        homes = {key: self._homes[key] for key in keys if key in self._homes}
        counts = [list(homes.values()).count(index) for index in range(len(self._pipelines))]
        for key in keys:
            if key not in homes:
                emptiest = min(range(len(counts)), key=counts.__getitem__)
                homes[key] = emptiest
                counts[emptiest] += 1
        return homes
