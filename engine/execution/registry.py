"""How steps are done: one decoder a file, the registry best first, ending in eager, which does every step.

A decoder that is fast at some rows only (decode, few of them) says in `share` which it takes; eager does the others, on
the same pages and the same stream. It may bring several ids a row, as far as the row's pages reach. State that it keeps
of a slot is stale when a row's start is not where it left off: then it reads the sequence anew.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

from engine.api import Objection
from engine.errors import Unsupported
from engine.execution import eager
from engine.execution.graph_decode import executor as graph
from engine.execution.step_state import Parts, Unfit
from engine.loading.progress import Progress
from engine.scheduling.plan import Row, StepPlan, StepResult


class Executor(Protocol):
    """Does steps on one model."""

    def warmup(self, progress: Progress) -> None:
        """What must be ready before the first request."""

    @property
    def tokens_per_step(self) -> int:
        """How far ahead of a row's first new token its pages should reach, that token counted."""

    def share(self, plan: StepPlan) -> tuple[Row, ...]:
        """The rows of a plan that it does, in their order."""

    def run(self, plan: StepPlan) -> StepResult:
        """One step of rows that it took. Called in torch's inference mode."""

    def forget(self, slots: Rows[int]) -> None:
        """These slots have new owners, or their owners begin anew."""

    def switch(self, name: str, enabled: bool) -> None:
        """Turns an optimisation on or off. Raises Unsupported for a name that it does not have."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ExecutorEntry:
    """One line of the registry."""

    name: str
    why_not: Callable[[Parts], str | None]  # None: it can serve this model on this machine
    make: Callable[[Parts], Executor]  # Unfit: it cannot after all


EXECUTORS: tuple[ExecutorEntry, ...] = (
    ExecutorEntry("graph", graph.why_not, graph.GraphDecode),
    ExecutorEntry("eager", eager.why_not, eager.Eager),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """The decoder in use, and why better ones are not."""

    name: str
    decoder: Executor
    objections: tuple[Objection, ...]


def choose(wanted: str, parts: Parts, registry: tuple[ExecutorEntry, ...] = EXECUTORS) -> Choice:
    """The first without objection, or the one asked for by name. Raises Unsupported where that one cannot hold."""
    objections: list[Objection] = []
    for entry in registry:
        if wanted not in ("auto", entry.name):
            continue
        reason = entry.why_not(parts)
        if reason is None:
            try:
                return Choice(entry.name, entry.make(parts), tuple(objections))
            except Unfit as unfit:
                reason = str(unfit)
        objections.append(Objection(decoder=entry.name, reason=reason))
    if not objections:
        names = ", ".join(entry.name for entry in registry)
        raise Unsupported(f"decoder {wanted!r} is not in this build; use auto or one of {names}")
    reasons = "; ".join(f"{one.decoder}: {one.reason}" for one in objections)
    raise Unsupported(f"decoder {wanted!r} cannot serve this model here ({reasons}); use decoder auto")
