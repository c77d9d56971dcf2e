"""Lists the executors, best first; the last one, eager, computes every row. All work on the same pages and stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.api import Objection
from engine.errors import Unsupported
from engine.execution import eager
from engine.execution.graphs import batch, decode, portable
from engine.execution.graphs.prefill import GraphPrefill
from engine.execution.router import Capacity, Role, StepOptions
from engine.execution.speculation import eager_executor
from engine.execution.speculation import verify_executor as verify
from engine.execution.step_state import Parts, Unfit
from engine.loading.progress import Progress
from engine.model.layers import many_tokens
from engine.scheduling.plan import RowResult, Share


class Executor(Protocol):
    """Computes shares of steps on one model. Some are `router.LaunchesAhead` or `router.Proposes`, too."""

    def run(self, share: Share, options: StepOptions) -> Mapping[int, RowResult]:
        """Returns results by key, with several ids only as far as a row's pages reach. Called in torch's inference
        mode, after the sequence table has applied the plan."""

    @property
    def capacity(self) -> Capacity:
        """Returns what the router may assign to this executor, once warm; empty where nothing bounds it."""

    def warmup(self, progress: Progress) -> None: ...

    @property
    def lookahead_tokens(self) -> int:
        """Returns how far a row's pages should reach beyond its first new token."""

    @property
    def max_tokens_per_row(self) -> int: ...

    @property
    def switches(self) -> Mapping[str, str | None]:
        """Returns the options of this executor, with reasons for those that do nothing here."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ExecutorEntry:
    name: str
    decoder: str  # the word of `--decoder` that stands for it and its neighbours of the same word
    why_not: Callable[[Parts], str | None]  # None: it can serve this model on this machine
    make: Callable[[Parts], Executor]  # Unfit: it cannot after all
    optional: bool = False  # whether its word can be had without it
    ask: Callable[[Parts], None] | None = None  # for the kernels that it will have, of shapes alone


EXECUTORS: tuple[ExecutorEntry, ...] = (
    # The first asks for no kernel that `graph_decode` does not.
    ExecutorEntry(Role.MASKED, "graph", decode.why_not, decode.Constrained, optional=True),
    ExecutorEntry(Role.VERIFY, "graph", verify.why_not, verify.CapturedSpeculation, optional=True, ask=verify.ask),
    ExecutorEntry(Role.FEW, "graph", decode.why_not, decode.GraphDecode, ask=decode.ask),
    ExecutorEntry(Role.PROMPTS, "graph", many_tokens.why_not, GraphPrefill, ask=lambda one: GraphPrefill(one).ask()),
    ExecutorEntry(Role.MANY, "graph", batch.why_not, batch.Batched, ask=lambda one: batch.steps(one).ask()),
    ExecutorEntry(Role.MANY, "portable", portable.why_not, portable.make, ask=portable.ask),
    ExecutorEntry(Role.DRAFTED, "eager", lambda parts: None, eager_executor.Speculation, optional=True),
    ExecutorEntry(Role.EAGER, "eager", lambda parts: None, eager.Eager),
)


def leaders(registry: tuple[ExecutorEntry, ...] = EXECUTORS) -> tuple[ExecutorEntry, ...]:
    """Returns the first entry of each word of `--decoder` that the word cannot do without."""
    first: dict[str, ExecutorEntry] = {}
    for entry in registry:
        if not entry.optional:
            first.setdefault(entry.decoder, entry)
    return tuple(first.values())


@dataclass(frozen=True, slots=True)
class ExecutorChoice:
    decoder: str
    executors: tuple[tuple[str, Executor], ...]  # with their names
    objections: tuple[Objection, ...]  # to better words of `--decoder`
    missing: tuple[Objection, ...] = ()  # to neighbours of the chosen one


def choose(wanted: str, parts: Parts, registry: tuple[ExecutorEntry, ...] = EXECUTORS) -> ExecutorChoice:
    """Takes the `wanted` word of `--decoder`, or the best that can serve, and the last of the registry behind its
    executors. Raises Unsupported where the wanted word cannot serve."""
    objections: list[Objection] = []
    for leader in leaders(registry):
        if wanted not in ("auto", leader.decoder):
            continue
        made = _make(leader, parts)
        if not isinstance(made, str):
            executors, missing = [], []
            for entry in registry:
                if entry.decoder != leader.decoder and entry is not registry[-1]:
                    continue
                one = made if entry is leader else _make(entry, parts)
                if isinstance(one, str):
                    missing.append(Objection(decoder=entry.name, reason=one))
                else:
                    executors.append((entry.name, one))
            return ExecutorChoice(leader.decoder, tuple(executors), tuple(objections), tuple(missing))
        objections.append(Objection(decoder=leader.decoder, reason=made))
    if not objections:
        names = ", ".join(entry.decoder for entry in leaders(registry))
        raise Unsupported(f"decoder {wanted!r} is not in this build; use auto or one of {names}")
    reasons = "; ".join(f"{one.decoder}: {one.reason}" for one in objections)
    raise Unsupported(f"decoder {wanted!r} cannot serve this model here ({reasons}); use decoder auto")


def _make(entry: ExecutorEntry, parts: Parts) -> Executor | str:
    reason = entry.why_not(parts)
    if reason is not None:
        return reason
    try:
        return entry.make(parts)
    except Unfit as unfit:
        return str(unfit)
