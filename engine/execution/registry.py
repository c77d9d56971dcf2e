"""The executors that can compute steps, best first. The last one, eager, computes every row.

The router decides which of them computes which rows of a step; all work on the same pages and the same stream. An
executor that gives several ids for a row does so as far as the row's pages reach.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.api import Objection
from engine.errors import Unsupported
from engine.execution import eager
from engine.execution.graphs import batch, decode, masked, prefill
from engine.execution.router import Capacity, Role, StepOptions
from engine.execution.speculation import eager_executor
from engine.execution.speculation import verify_executor as verify
from engine.execution.step_state import Parts, Unfit
from engine.loading.progress import Progress
from engine.model.layers import many_tokens
from engine.scheduling.plan import RowResult, Share


class Executor(Protocol):
    """Computes shares of steps on one model. One that launches ahead is a `router.LaunchesAhead` too, and one that
    verifies drafts a `router.Proposes`."""

    def run(self, share: Share, options: StepOptions) -> Mapping[int, RowResult]:
        """Returns, by key, what the rows that sample or score brought. It is called in torch's inference mode, after
        the sequences' slots and pages were brought up to date."""

    @property
    def capacity(self) -> Capacity:
        """What the router may give it, once it is warm; of the other executors' capacity nothing."""

    def warmup(self, progress: Progress) -> None:
        """What must be ready before the first request."""

    @property
    def lookahead_tokens(self) -> int:
        """How far beyond a row's first new token its pages should reach."""

    @property
    def max_tokens_per_row(self) -> int:
        """Returns the most ids of a row in one step."""

    @property
    def switches(self) -> Mapping[str, str | None]:
        """The options that make a difference here; for each that does nothing for this model on this machine, why."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ExecutorEntry:
    """One line of the registry."""

    name: str
    decoder: str  # the word of `--decoder` that stands for it and its neighbours of the same word
    why_not: Callable[[Parts], str | None]  # None: it can serve this model on this machine
    make: Callable[[Parts], Executor]  # Unfit: it cannot after all
    optional: bool = False  # whether its word can be had without it
    ask: Callable[[Parts], None] | None = None  # for the kernels that it will have, of shapes alone


EXECUTORS: tuple[ExecutorEntry, ...] = (
    ExecutorEntry(  # asks for no kernel that `graph_decode` does not
        Role.MASKED, "graph", masked.why_not, masked.Constrained, optional=True
    ),
    ExecutorEntry(
        Role.VERIFY,
        "graph",
        verify.why_not,
        verify.CapturedSpeculation,
        optional=True,
        ask=verify.ask,
    ),
    ExecutorEntry(Role.FEW, "graph", decode.why_not, decode.GraphDecode, ask=decode.ask),
    ExecutorEntry(Role.PROMPTS, "graph", many_tokens.why_not, prefill.make, ask=prefill.ask),
    ExecutorEntry(Role.MANY, "graph", batch.why_not, batch.Batched, ask=batch.ask),
    ExecutorEntry(Role.DRAFTED, "eager", eager_executor.why_not, eager_executor.Speculation, optional=True),
    ExecutorEntry(Role.EAGER, "eager", eager.why_not, eager.Eager),
)


def leaders(registry: tuple[ExecutorEntry, ...] = EXECUTORS) -> tuple[ExecutorEntry, ...]:
    """The first entry of each word of `--decoder` that is not optional: whether the word can be had depends on it."""
    first: dict[str, ExecutorEntry] = {}
    for entry in registry:
        if not entry.optional:
            first.setdefault(entry.decoder, entry)
    return tuple(first.values())


@dataclass(frozen=True, slots=True)
class ExecutorChoice:
    """The executors in use, best first, and why better ones are not."""

    decoder: str
    executors: tuple[tuple[str, Executor], ...]  # with their names
    objections: tuple[Objection, ...]  # to better words of `--decoder`
    missing: tuple[Objection, ...] = ()  # to neighbours of the chosen one


def choose(wanted: str, parts: Parts, registry: tuple[ExecutorEntry, ...] = EXECUTORS) -> ExecutorChoice:
    """The best word of `--decoder` without objection, or the one asked for, with all its executors that can serve, and
    the last of the registry behind them. Raises Unsupported where the one asked for cannot serve."""
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
    """The executor, or why there is none."""
    reason = entry.why_not(parts)
    if reason is not None:
        return reason
    try:
        return entry.make(parts)
    except Unfit as unfit:
        return str(unfit)
