"""Does the steps that the scheduler plans, with the decoder that was chosen. Implements `engine.plan.Runner`."""

from __future__ import annotations

import torch

from engine.api import ModelInfo
from engine.decoders import Decoder
from engine.decoders.parts import Parts
from engine.errors import Unsupported
from engine.plan import StepPlan, StepResult


class ModelRunner:
    """One model on one device."""

    def __init__(self, info: ModelInfo, parts: Parts, decoder: Decoder, fallback: Decoder) -> None:
        self._info = info
        self._parts = parts
        self._decoder = decoder
        self._fallback = fallback

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""
        return self._info

    def run(self, plan: StepPlan) -> StepResult:
        """One step."""
        with torch.inference_mode():
            if plan.fresh_slots:
                self._parts.sampler.forget(plan.fresh_slots)
            decoder = self._decoder if self._decoder.accepts(plan) else self._fallback
            return decoder.run(plan)

    def set_optimization(self, name: str, enabled: bool) -> None:
        """None of the runner's own yet."""
        raise Unsupported(f"the engine has no optimization {name!r}")

    def close(self) -> None:
        """Ends the decoders."""
        self._decoder.close()
        if self._fallback is not self._decoder:
            self._fallback.close()
