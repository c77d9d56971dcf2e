"""Does the steps that the scheduler plans, with the executors that were chosen."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.api import ModelInfo
from engine.errors import Unsupported
from engine.execution.registry import Executor
from engine.execution.sharing import Sharing
from engine.execution.step_state import Parts
from engine.kv.page_transfer import PoolPages
from engine.scheduling.plan import StepPlan, StepResult


class ModelRunner:
    """A `Runner` of one model on one device."""

    def __init__(self, info: ModelInfo, parts: Parts, executors: tuple[Executor, ...]) -> None:
        self._info = info
        self._sequences = parts.sequences
        self._constraints = parts.constraints
        self._executors = executors
        self._sharing = Sharing(executors)  # the last claims all that is left
        self._pages = PoolPages(parts.pool)
        self._meanwhile = parts.meanwhile

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
        self._sequences.apply(plan)
        self._constraints.begin(plan)
        with torch.inference_mode():
            results, _ = self._sharing.run(plan.rows)
        results = self._constraints.follow(plan.rows, results)
        self._sequences.append(plan.rows, results)
        return StepResult(results)

    def meanwhile(self, piece: Callable[[], bool]) -> None:
        """What is done while a pass of prompts is waited for."""
        self._meanwhile.piece = piece

    def set_optimization(self, name: str, enabled: bool) -> None:
        """The executors' switches. One that does nothing here may be set as well; Unsupported for any other name."""
        having = [executor for executor in self._executors if name in executor.switches]
        if not having and name not in (one.name for one in self._info.unused):
            raise Unsupported(f"the engine has no optimization {name!r}")
        for executor in having:
            executor.switch(name, enabled)

    def close(self) -> None:
        """Ends the executors."""
        for executor in self._executors:
            executor.close()
        self._constraints.close()
