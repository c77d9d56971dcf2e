"""The executor of captured decode steps: whole steps of up to eight rows that copy nothing, launched ahead of their
tokens. Up to sixteen rows are two such steps, one after the other."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import torch

from engine.execution.batched import executor as batched
from engine.execution.graph_decode import weights
from engine.execution.graph_decode.alternating import MOST_PIPELINES, AlternatingPipelines
from engine.execution.graph_decode.captured_steps import CapturedSteps
from engine.execution.graph_decode.pipeline import AHEAD, BUCKETS, DecodePipeline, ahead_of
from engine.execution.needs import chosen_by_kernels
from engine.execution.step_state import Parts, Unfit, no_gpu
from engine.kernels.build import BuildError
from engine.loading.progress import Progress
from engine.scheduling.plan import Row, RowResult


def why_not(parts: Parts) -> str | None:
    """Why it cannot serve this model here, or None."""
    objection = no_gpu(parts)
    if objection is not None:
        return objection
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        return "cuda.core is not installed"
    return weights.why_not(parts)


def ask(parts: Parts) -> None:
    """Asks for every kernel that it will have; of shapes alone."""
    read, _ = weights.shared(parts)
    device = CapturedSteps(parts.kernels, read, parts.max_context, parts.max_sequences)
    device.build(device.sizes)


class GraphDecode:
    """Decodes rows of one token."""

    lookahead_tokens = 2 * AHEAD - 1
    max_tokens_per_row = 2 * AHEAD

    def __init__(self, parts: Parts) -> None:
        rows = range(0, min(parts.max_sequences, MOST_PIPELINES * BUCKETS[-1]), BUCKETS[-1])
        with torch.inference_mode():
            try:
                read, self._why_one_pass = weights.shared(parts)
                self._devices = [
                    CapturedSteps(parts.kernels, read, parts.max_context, parts.max_sequences - first) for first in rows
                ]
                self._devices[0].build(BUCKETS[:1])
            except BuildError as failure:
                raise Unfit(" ".join(str(failure).split())[:300]) from failure
        self._sequences = parts.sequences
        self._each = [DecodePipeline(device, parts.sequences, parts.max_context) for device in self._devices]
        self._pipelines = AlternatingPipelines(
            self._each,
            parts.sequences,
            chosen_by_kernels if batched.why_not(parts) is None else None,
        )
        self._fused = True
        self._prompt_ends = False  # in the step whose rows were claimed last

    def warmup(self, progress: Progress) -> None:
        """Compiles, captures, and measures what a step costs."""
        with torch.inference_mode():
            self._devices[0].settle()
            for device in self._devices:
                device.warmup(progress)
            for device, pipeline in zip(self._devices, self._each, strict=True):
                pipeline.most_ahead = {size: ahead_of(device.seconds(size)) for size in device.sizes}

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Rows of one token that the kernels can choose a successor for, as far as the pipelines take them."""
        if not self._fused:
            return ()
        of = self._sequences.of
        self._prompt_ends = any(row.count > 1 and row.sample for row in rows)
        mine = tuple(row for row in rows if row.count == 1 and row.sample and chosen_by_kernels(of(row)))
        return self._pipelines.claims(mine)

    def run(self, rows: tuple[Row, ...]) -> dict[int, RowResult]:
        """One token or several a row. A prompt that ends in this step stands behind what is launched here, and its
        sequence then joins these rows: further steps would be waited for twice."""
        return self._pipelines.step(rows, further=not self._prompt_ends)

    def hand_over(self, rows: tuple[Row, ...]) -> dict[int, RowResult]:
        """See `sharing.HandingOver`."""
        of = self._sequences.of
        return self._pipelines.hand_over(rows) if all(chosen_by_kernels(of(row)) for row in rows) else {}

    @property
    def switches(self) -> Mapping[str, str | None]:
        """A step as a graph, kernels of our own, and a coarse copy of the head where there is one."""
        return {"graphs": None, "fused_kernels": None, "two_pass_head": self._why_one_pass}

    def switch(self, name: str, enabled: bool) -> None:
        """`graphs`: off, the kernels are launched one by one. `fused_kernels`: off, it does nothing. `two_pass_head`:
        off, the whole head is read."""
        if name == "graphs":
            for device in self._devices:
                device.graphs = enabled
        elif name == "two_pass_head":
            for device in self._devices:
                device.two_pass = enabled
        elif name == "fused_kernels":
            self._fused = enabled

    def close(self) -> None:
        """Gives the graphs back."""
        for device in self._devices:
            device.close()
