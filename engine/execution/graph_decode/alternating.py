"""More rows than one pipeline holds: two pipelines share them, and their steps take turns on the device. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from engine.execution.graph_decode.pipeline import AHEAD, BUCKETS, DecodePipeline
from engine.scheduling.plan import Row, RowResult

MOST_PIPELINES = 2
AHEAD_IN_TURN = 2  # steps that a pipeline launches before it lets the other, which waits for as many


class AlternatingPipelines:
    """Up to eight rows are the first pipeline's. Of more, each stays with the pipeline that has it."""

    def __init__(self, pipelines: Rows[DecodePipeline]) -> None:
        self._pipelines = tuple(pipelines)
        self._homes: dict[int, int] = {}  # key of a row → index of its pipeline

    @property
    def most_rows(self) -> int:
        """Rows that it can step at once."""
        return len(self._pipelines) * BUCKETS[-1]

    def step(self, rows: Rows[Row]) -> dict[int, RowResult]:
        """At least one id for each row, and whatever else has come."""
        self._homes = self._assign(rows)
        ahead = AHEAD if len(rows) <= BUCKETS[-1] else AHEAD_IN_TURN
        found: dict[int, RowResult] = {}
        for index, pipeline in enumerate(self._pipelines):
            share = [row for row in rows if self._homes[row.key] == index]
            if share:
                found |= pipeline.step(share, ahead)
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
