"""Runs the steps that the scheduler plans, on the executors that were chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple

import torch
from msgspec.structs import replace

from engine.api import ModelInfo
from engine.errors import Unsupported
from engine.execution.registry import Executor
from engine.execution.router import Capacity, Executors, LaunchesAhead, Proposes, Role, Router, StepOptions
from engine.execution.step_state import Parts
from engine.kv.page_transfer import PoolPages
from engine.scheduling.plan import Assignment, PageAccess, RowResult, StepPlan, StepResult


class ModelRunner:
    """A `Runner` of one model on one device."""

    def __init__(self, info: ModelInfo, parts: Parts, executors: Mapping[str, Executor]) -> None:
        """`executors` are warm, keyed by `Role`, and include eager."""
        self._info = info
        self._sequences = parts.sequences
        self._constraints = parts.constraints
        self._executors = executors
        self._router = Router(parts.sequences, capacity_of(executors.values()), asked_of(executors))
        self._options = StepOptions()
        self._group = parts.group
        self._pages: PageAccess = PoolPages(parts.pool) if parts.group is None else parts.group.pages
        self._idle_work = parts.idle_work

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def pages(self) -> PageAccess:
        return self._pages

    def run(self, plan: StepPlan, assignment: Assignment | None = None) -> StepResult:
        """Follows a recorded `assignment`; shares of executors that are not in use are eager's."""
        self._sequences.apply(plan)
        self._constraints.begin(plan)
        if self._group is not None:
            self._group.began(plan)
        routed = self._router.assign(plan, self._options)
        assignment = routed if assignment is None else assignment
        results: dict[int, RowResult] = {}
        with torch.inference_mode():
            for share in assignment.shares:
                results |= self._executors.get(share.executor, self._executors[Role.EAGER]).run(share, self._options)
        followed = self._constraints.follow(plan.rows, results)
        self._sequences.append(plan.rows, followed)
        if self._group is not None:
            self._group.followed(plan.rows, followed)
        return StepResult(followed, assignment)

    def meanwhile(self, piece: Callable[[], bool]) -> None:
        self._idle_work.piece = piece

    def set_optimization(self, name: str, enabled: bool) -> None:
        """Raises Unsupported for an unknown name; one without effect here is accepted."""
        having = any(name in executor.switches for executor in self._executors.values())
        if not having and name not in (one.name for one in self._info.unused):
            raise Unsupported(f"the engine has no optimization {name!r}")
        if having:
            self._options = replace(self._options, **{name: enabled})

    def close(self) -> None:
        for executor in self._executors.values():
            executor.close()
        self._constraints.close()
        if self._group is not None:
            self._group.close()


def capacity_of(executors: Iterable[Executor]) -> Capacity:
    each = [astuple(executor.capacity) for executor in executors]  # each number is one executor's alone
    return Capacity(*(max(numbers) for numbers in zip(*each, strict=True)))


def asked_of(executors: Mapping[str, object]) -> Executors:
    ahead = {Role(name): one for name, one in executors.items() if isinstance(one, LaunchesAhead)}
    verify, drafted = executors.get(Role.VERIFY), executors.get(Role.DRAFTED)
    return Executors(
        ahead,
        verify if isinstance(verify, Proposes) else None,
        drafted if isinstance(drafted, Proposes) else None,
    )
