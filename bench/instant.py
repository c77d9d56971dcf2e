"""Provides a runner without a GPU and without work: the decode pipelines for few and for many rows, over devices that
return every token at the first poll."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from engine.errors import EngineFailed
from engine.execution.batched.executor import BUCKETS, FEW, Batched
from engine.execution.batched.pipeline import BatchPipeline, Changes
from engine.execution.graph_decode.alternating import MOST_PIPELINES, AlternatingPipelines
from engine.execution.graph_decode.executor import GraphDecode
from engine.execution.graph_decode.pipeline import DecodePipeline, RowState
from engine.execution.needs import chosen_by_kernels
from engine.execution.sharing import Sharing
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Row, RowResult, StepPlan, StepResult
from engine.scheduling.sequence_state import SequenceTable
from engine.settings import PAGE_SIZE

TOKEN = 5
LIMITS = Limits(
    max_sequences=256,
    max_batch_tokens=8192,
    max_context=1216,
    lookahead_tokens=max(GraphDecode.lookahead_tokens, Batched.lookahead_tokens),
    max_tokens_per_row=max(GraphDecode.max_tokens_per_row, Batched.max_tokens_per_row),
)


class InstantSteps:
    """Implements `graph_decode.pipeline.StepDevice`, the device of the pipelines for few rows."""

    def __init__(self) -> None:
        self._last = 0  # number of the last step that was launched

    def write(self, states: Rows[RowState], number: int) -> None:
        self._last = number

    def add_pages(self, index: int, first: int, pages: Rows[int]) -> None:
        """Ignores pages: this device stores no keys and values."""

    def launch(self, steps: int, longest: int) -> None:
        self._last += steps

    def poll(self, index: int, number: int) -> int | None:
        return TOKEN if number <= self._last else None

    def wait(self) -> None:
        raise EngineFailed("nothing is under way")


class InstantBatches:
    """Implements `batched.pipeline.StepDevice`, the device of the pipeline for many rows."""

    def __init__(self) -> None:
        self._launched = 0

    def change(self, changes: Changes) -> None:
        """Ignores row changes: this device keeps no row state."""

    def launch(self, rows: int) -> None:
        self._launched += 1

    def poll(self, number: int, rows: int) -> Rows[int] | None:
        return (TOKEN,) * rows if number <= self._launched else None

    def wait(self) -> None:
        raise EngineFailed("nothing is under way")


class FewRows:
    """Claims the rows that the `graph_decode` executor would claim."""

    def __init__(self, sequences: SequenceTable, limits: Limits) -> None:
        each = [DecodePipeline(InstantSteps(), sequences, limits.max_context) for _ in range(MOST_PIPELINES)]
        others = chosen_by_kernels if limits.max_sequences > FEW else None
        self._sequences, self._pipelines = sequences, AlternatingPipelines(each, sequences, others)

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        of = self._sequences.of
        return self._pipelines.claims(
            tuple(row for row in rows if row.count == 1 and row.sample and chosen_by_kernels(of(row)))
        )

    def run(self, rows: tuple[Row, ...]) -> dict[int, RowResult]:
        return self._pipelines.step(rows)


class ManyRows:
    """Claims the rows that the `batched` executor would claim."""

    def __init__(self, sequences: SequenceTable, limits: Limits) -> None:
        self._sequences = sequences
        self._pipeline = BatchPipeline(InstantBatches(), sequences, limits.max_context, BUCKETS)

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        of, holds = self._sequences.of, self._pipeline.holds
        return tuple(
            row for row in rows if row.count == 1 and row.sample and (holds(row.key) or chosen_by_kernels(of(row)))
        )

    def run(self, rows: tuple[Row, ...]) -> dict[int, RowResult]:
        return self._pipeline.step(rows)


class Prompts:
    """Claims every row that the other executors left over."""

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        return rows

    def run(self, rows: tuple[Row, ...]) -> dict[int, RowResult]:
        return {row.key: RowResult((TOKEN,)) for row in rows if row.sample}


class InstantRunner:
    """Runs steps as the model's runner does, but does not apply constraints."""

    def __init__(self, max_sequences: int, max_context: int) -> None:
        self._sequences = SequenceTable()
        self.limits = Limits(
            max_sequences=max_sequences,
            max_batch_tokens=LIMITS.max_batch_tokens,
            max_context=max_context,
            lookahead_tokens=LIMITS.lookahead_tokens,
            max_tokens_per_row=LIMITS.max_tokens_per_row,
        )
        self.pages = max_sequences * -(-max_context // PAGE_SIZE)
        few, many = FewRows(self._sequences, self.limits), ManyRows(self._sequences, self.limits)
        self._sharing = Sharing((few, many, Prompts()))

    def run(self, plan: StepPlan) -> StepResult:
        self._sequences.apply(plan)
        results, _ = self._sharing.run(plan.rows)
        self._sequences.append(plan.rows, results)
        return StepResult(results)
