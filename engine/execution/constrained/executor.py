"""The executor of decode steps in which some row has a constraint: up to eight rows, those without one among them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows

import torch

from engine.execution.constrained.pipeline import MOST_ROWS, HalvesPipeline, Mask
from engine.execution.constrained.steps import HalvedSteps
from engine.execution.graph_decode import executor as graph_decode
from engine.execution.graph_decode import weights
from engine.execution.needs import chosen_by_kernels
from engine.execution.step_state import Parts, Unfit
from engine.kernels.build import BuildError
from engine.loading.progress import Progress
from engine.scheduling.plan import Row, RowResult

why_not = graph_decode.why_not


class Constrained:
    """Decodes rows of one token."""

    lookahead_tokens = 2
    max_tokens_per_row = 1

    def __init__(self, parts: Parts) -> None:
        with torch.inference_mode():
            try:
                read, self._why_one_pass = weights.shared(parts)
                self._steps = HalvedSteps(parts.kernels, read, parts.max_context, parts.max_sequences)
            except BuildError as failure:
                raise Unfit(" ".join(str(failure).split())[:300]) from failure
        self._sequences = parts.sequences
        self._constraints = parts.constraints
        self._pipeline = HalvesPipeline(self._steps, parts.sequences, parts.max_context, self)
        self._fused = True

    def warmup(self, progress: Progress) -> None:
        """Nothing is prepared: most servers are never asked for a constraint."""

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """All rows of one token, where some row of the step has a constraint, be it fed several: those without one go
        the same way meanwhile, so that nothing launched ahead for them is lost."""
        of, constrained = self._sequences.of, self._constraints.constrained
        if not self._fused or not any(constrained(row.key) and chosen_by_kernels(of(row), masked=True) for row in rows):
            return ()
        mine = tuple(
            row
            for row in rows
            if row.count == 1 and row.sample and not row.score and chosen_by_kernels(of(row), masked=True)
        )
        return mine if len(mine) <= MOST_ROWS else ()

    def run(self, rows: tuple[Row, ...]) -> dict[int, RowResult]:
        """One token a row."""
        return self._pipeline.step(rows)

    def mask(self, key: int) -> Mask:
        """See `pipeline.Grammar`."""
        return self._constraints.mask(key)

    def ready(self, key: int) -> bool:
        """See `pipeline.Grammar`."""
        return self._constraints.ready(key)

    def take(self, rows: Rows[Row], found: dict[int, RowResult]) -> dict[int, RowResult]:
        """See `pipeline.Grammar`."""
        found = self._constraints.ended(found, [self._sequences.of(row) for row in rows])
        return self._constraints.follow(rows, found)

    @property
    def switches(self) -> Mapping[str, str | None]:
        """As `graph_decode` has them."""
        return {"graphs": None, "fused_kernels": None, "two_pass_head": self._why_one_pass}

    def switch(self, name: str, enabled: bool) -> None:
        """As `graph_decode` does."""
        if name == "graphs":
            self._steps.graphs = enabled
        elif name == "two_pass_head":
            self._steps.two_pass = enabled
        elif name == "fused_kernels":
            self._fused = enabled

    def close(self) -> None:
        """Gives the graphs back."""
        self._steps.close()
