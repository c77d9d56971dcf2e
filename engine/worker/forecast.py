"""Predicts how a GPU that need not be here would serve a model: by which decoder, and why by no better one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch

from engine.errors import Unsupported
from engine.execution.registry import EXECUTORS, Executor, ExecutorChoice, ExecutorEntry, choose
from engine.execution.step_state import Parts, making
from engine.kernels.build import Source, WantedKernels
from engine.linear import DenseLinear
from engine.settings import EngineSettings
from engine.worker.required_kernels import KernelQuery, models_of_shapes


@dataclass(frozen=True, slots=True)
class Forecast:
    choice: ExecutorChoice  # its executors were not made and cannot run
    parts: Parts  # of shapes alone
    kernels: frozenset[Source]

    @property
    def has_plain_layers(self) -> bool:
        """Whether some product of a layer has weights in sixteen bits."""
        return any(isinstance(one, DenseLinear) for one in self.parts.model.weights.in_order()[:-1])


def forecast(settings: EngineSettings, what: KernelQuery, kernels: bool = True) -> Forecast:
    """Chooses executors as a start does, over a model of shapes alone. Each is asked for its kernels in place of being
    made; without `kernels`, which takes a tenth of the time, none is, and a block that does not fit the GPU is
    overlooked. Raises Unsupported where the decoder that `settings` names could not serve."""
    wanted = WantedKernels(what.gpu)
    registry = tuple(_asking(entry, kernels) for entry in EXECUTORS)
    found: Forecast | None = None
    with torch.inference_mode():
        for parts in models_of_shapes(settings, what, wanted):
            choice = choose(settings.decoder, parts, registry)
            found = Forecast(choice, parts, frozenset())
    if found is None:
        raise Unsupported("there is no model to serve")
    return replace(found, kernels=frozenset(wanted.sources))


def _asking(entry: ExecutorEntry, kernels: bool) -> ExecutorEntry:
    def make(parts: Parts) -> Executor:
        with making():
            if kernels and entry.ask is not None:
                entry.ask(parts)
        return cast(Executor, entry)

    return replace(entry, make=make)
