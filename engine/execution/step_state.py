"""Holds what executors are made from: a loaded model, and state that all of them share and none of them owns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TypeVar

import torch

from engine.constraints.constraints import Constraints
from engine.execution.poller import IdleWork
from engine.execution.speculation.draft_model import DraftModel
from engine.kernels.build import BuildError, GpuKernels, Kernels, why_no_gpu
from engine.kernels.exchange import RankSums
from engine.kv.kv_cache import KvCache
from engine.kv.page_transfer import RankGroup
from engine.linear.chosen import ChosenProducts
from engine.linear.plain_copies import PlainCopies
from engine.model.layers import few_rows_weights
from engine.model.layers.few_rows import StepWeights
from engine.model.transformer import Transformer
from engine.sampling.sampler import Sampler
from engine.scheduling.sequence_state import SequenceTable
from engine.settings import CUDA_BATCH_TOKENS

T = TypeVar("T")


class Unfit(Exception):
    """An executor that is being made cannot serve here; the message says why in one line."""


@dataclass(slots=True)
class DecodeWeights:
    """Keeps the model as decode kernels read it, and why the head is read in one pass, if it is."""

    made: tuple[StepWeights, str | None] | None = None  # by the first executor that wants it


@dataclass(frozen=True, slots=True)
class Parts:
    model: Transformer
    pool: KvCache
    sampler: Sampler  # with the token counts that penalties need, by slot
    max_sequences: int
    max_context: int  # tokens
    max_batch_tokens: int = CUDA_BATCH_TOKENS[0]  # prompt tokens of a step
    sequences: SequenceTable = field(default_factory=SequenceTable)
    constraints: Constraints = field(default_factory=Constraints)
    plain: PlainCopies = field(default_factory=PlainCopies)
    chosen: ChosenProducts = field(default_factory=ChosenProducts)
    decode: DecodeWeights = field(default_factory=DecodeWeights)
    draft: DraftModel | None = None
    gpu: GpuKernels = field(default_factory=GpuKernels)
    idle_work: IdleWork = field(default_factory=IdleWork)
    group: RankGroup | None = None  # of a split model
    sums: RankSums | None = None  # likewise, where its ranks reach each other's memory

    @property
    def step_weights(self) -> tuple[StepWeights, str | None]:
        if self.decode.made is None:
            self.decode.made = few_rows_weights.read(self)
        return self.decode.made

    @property
    def kernels(self) -> Kernels:
        return self.gpu.open(self.model.placement.device)

    def led(self, device: T) -> T:
        """Returns the device through which a pipeline drives all ranks of a split model."""
        return device if self.group is None else self.group.led(device)


@contextmanager
def making() -> Iterator[None]:
    """Raises Unfit for failures within, with the reason."""
    try:
        with torch.inference_mode():
            yield
    except (BuildError, ImportError, ValueError, torch.OutOfMemoryError) as failure:
        raise Unfit(" ".join(str(failure).split())[:300]) from failure


def kernel_switches(why_one_pass: str | None) -> Mapping[str, str | None]:
    """`why_one_pass`: why the head has no coarse copy."""
    return {"graphs": None, "fused_kernels": None, "two_pass_head": why_one_pass}


def why_no_kernels(parts: Parts) -> str | None:
    """Returns why kernels of our own cannot run here. A model that is shapes alone needs no GPU and no compiler."""
    if parts.model.placement.device.type == "meta":
        return None
    installed = find_spec("cuda") is not None and find_spec("cuda.core") is not None
    objection = why_no_gpu(parts.model.placement.device) or (None if installed else "cuda.core is not installed")
    if objection is None and parts.group is not None and parts.sums is None:
        return parts.group.why_no_sums
    return objection
