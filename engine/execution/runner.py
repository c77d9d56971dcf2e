"""Does the steps that the scheduler plans, with the decoder that was chosen: a `Runner` of `engine.scheduling.plan`."""

from __future__ import annotations

import torch

from engine.api import ModelInfo
from engine.errors import Unsupported
from engine.execution.registry import Executor
from engine.execution.step_state import Parts
from engine.kv.page_transfer import PoolPages
from engine.scheduling.plan import RowResult, StepPlan, StepResult


class ModelRunner:
    """One model on one device."""

    def __init__(self, info: ModelInfo, parts: Parts, decoders: tuple[Executor, ...]) -> None:
        self._info = info
        self._parts = parts
        self._decoders = decoders  # each does what those before it left; the last does every row
        self._pages = PoolPages(parts.pool)

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""
        return self._info

    @property
    def pages(self) -> PoolPages:
        """Keys and values as bytes."""
        return self._pages

    def run(self, plan: StepPlan) -> StepResult:
        """One step."""
        with torch.inference_mode():
            if plan.fresh_slots:
                self._parts.sampler.forget(plan.fresh_slots)
                for decoder in self._decoders:
                    decoder.forget(plan.fresh_slots)
            results: dict[int, RowResult | None] = {}
            left = plan.rows
            for decoder in self._decoders:
                share = decoder.share(StepPlan(left, ())) if left else ()
                if share:
                    found = decoder.run(StepPlan(share, ())).rows
                    results |= {id(row): result for row, result in zip(share, found, strict=True)}
                    left = tuple(row for row in left if id(row) not in results)
            return StepResult(tuple(results[id(row)] for row in plan.rows))

    def set_optimization(self, name: str, enabled: bool) -> None:
        """The decoders' switches. Raises Unsupported for a name that none of them has."""
        refused = 0
        for decoder in self._decoders:
            try:
                decoder.switch(name, enabled)
            except Unsupported:
                refused += 1
        if refused == len(self._decoders):
            raise Unsupported(f"the engine has no optimization {name!r}")

    def close(self) -> None:
        """Ends the decoders."""
        for decoder in self._decoders:
            decoder.close()
