"""The executor of many rows of one token: one captured step moves up to 512 of them, launched ahead of their tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import MappingProxyType

import torch

from engine.execution.batched.pipeline import MOST_AHEAD, BatchPipeline
from engine.execution.batched.steps import BatchedSteps
from engine.execution.needs import chosen_by_kernels
from engine.execution.step_state import Parts, Unfit
from engine.kernels import batch_attention
from engine.kernels.build import BuildError
from engine.loading.progress import Progress
from engine.model.layers import many_tokens
from engine.scheduling.plan import Row, RowResult

FEW = 8  # rows, which one pipeline of `graph_decode` holds
BUCKETS = (16, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512)


def why_not(parts: Parts) -> str | None:
    """Why it cannot serve this model here, or None."""
    if parts.max_sequences <= FEW:
        return f"no more than {FEW} sequences run at once, which graph_decode takes"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        return "cuda.core is not installed"
    return many_tokens.why_not(parts) or batch_attention.why_not(many_tokens.heads_of(parts))


def ask(parts: Parts) -> None:
    """Asks for every kernel that it will have; of shapes alone."""
    BatchedSteps(parts, _buckets(parts)).ask()


def _buckets(parts: Parts) -> tuple[int, ...]:
    most = next((size for size in BUCKETS if size >= parts.max_sequences), BUCKETS[-1])
    return tuple(size for size in BUCKETS if size <= most)


class Batched:
    """Decodes rows of one token."""

    lookahead_tokens = 2 * MOST_AHEAD + 1
    switches: Mapping[str, str | None] = MappingProxyType({"graphs": None, "fused_kernels": None})
    max_tokens_per_row = MOST_AHEAD

    def __init__(self, parts: Parts) -> None:
        buckets = _buckets(parts)
        try:
            with torch.inference_mode():
                self._steps = BatchedSteps(parts, buckets)
        except (BuildError, ImportError, ValueError, torch.OutOfMemoryError) as failure:
            raise Unfit(" ".join(str(failure).split())[:300]) from failure
        self._sequences = parts.sequences
        self._pipeline = BatchPipeline(self._steps, parts.sequences, parts.max_context, buckets)
        self._fused = True

    def warmup(self, progress: Progress) -> None:
        """Compiles and captures."""
        with torch.inference_mode():
            self._steps.warmup(progress)

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Rows of one token that the kernels can choose a successor for, as many as there are row states."""
        if not self._fused:
            return ()
        of, holds = self._sequences.of, self._pipeline.holds
        mine = tuple(
            row for row in rows if row.count == 1 and row.sample and (holds(row.key) or chosen_by_kernels(of(row)))
        )
        return mine[: self._pipeline.most_rows]

    def run(self, rows: tuple[Row, ...]) -> dict[int, RowResult]:
        """One token or several a row."""
        return self._pipeline.step(rows)

    def switch(self, name: str, enabled: bool) -> None:
        """`graphs`: off, the kernels are launched one by one. `fused_kernels`: off, it does nothing."""
        if name == "graphs":
            self._steps.graphs = enabled
        elif name == "fused_kernels":
            self._fused = enabled

    def close(self) -> None:
        """Gives the graphs back."""
        self._steps.close()
