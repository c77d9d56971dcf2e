"""Computes steps of any number of rows of models that the fused kernels do not take: the executor of many rows over
another walk, from one row on. Prompts, masks and log-probabilities are eager's."""

from __future__ import annotations

from engine.execution.graphs import batch
from engine.execution.graphs.batch import Batched, BatchedSteps
from engine.execution.step_state import Parts, why_no_kernels
from engine.model.layers import portable
from engine.model.layers.portable import PortableRows

BUCKETS = (1, 2, 4, 8, *batch.BUCKETS)  # rows


def why_not(parts: Parts) -> str | None:
    if parts.group is not None:
        return "each process of a split model computes a part of a layer, and this walk whole ones"
    return why_no_kernels(parts) or portable.why_not(parts)


def steps(parts: Parts) -> BatchedSteps:
    return batch.steps(parts, PortableRows, BUCKETS)


def make(parts: Parts) -> Batched:
    return Batched(parts, steps)


def ask(parts: Parts) -> None:
    steps(parts).ask()
