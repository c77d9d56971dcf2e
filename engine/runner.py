"""Does the steps that the scheduler plans, with the decoder that was chosen. Implements `engine.plan.Runner`."""

from __future__ import annotations

import torch

from engine.api import ModelInfo
from engine.decoders import Decoder
from engine.decoders.parts import Parts
from engine.plan import Row, RowResult, StepPlan, StepResult


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
                self._decoder.forget(plan.fresh_slots)
            share = self._decoder.share(plan)
            if len(share) == len(plan.rows):
                return self._decoder.run(plan)
            if not share:
                return self._fallback.run(plan)
            return self._run_both(plan, share)

    def _run_both(self, plan: StepPlan, share: tuple[Row, ...]) -> StepResult:
        """The decoder's rows, then the others."""
        taken = {id(row) for row in share}
        others = tuple(row for row in plan.rows if id(row) not in taken)
        results: dict[int, RowResult | None] = {}
        for decoder, rows in ((self._decoder, share), (self._fallback, others)):
            found = decoder.run(StepPlan(rows, ())).rows
            results |= {id(row): result for row, result in zip(rows, found, strict=True)}
        return StepResult(tuple(results[id(row)] for row in plan.rows))

    def set_optimization(self, name: str, enabled: bool) -> None:
        """The decoder's switches."""
        self._decoder.switch(name, enabled)

    def close(self) -> None:
        """Ends the decoders."""
        self._decoder.close()
        if self._fallback is not self._decoder:
            self._fallback.close()
