"""Mirrors the sequences that hold slots for a runner. It agrees with the scheduler's own record because both follow the
same plans and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from engine.api import Constraint, SamplingParams, Stopping
from engine.errors import EngineFailed
from engine.scheduling.plan import Admitted, Row, RowResult, StepPlan


@dataclass(slots=True, eq=False)
class SequenceState:
    """Lives from a sequence's admission to its release. Executors read it, `SequenceTable` writes it."""

    key: int
    slot: int
    token_ids: list[int]  # prompt, then output
    prompt_length: int
    sampling: SamplingParams
    stopping: Stopping
    logprobs: int | None
    draft_limit: int | None = None
    constraint: Constraint | None = None
    prompt_logprobs: int | None = None
    pages: list[int] = field(default_factory=list)  # page i holds positions 16·i … 16·i + 15
    page_table_version: int = (
        0  # how often pages that it had before were replaced; more pages at the end are no exchange
    )

    @property
    def output_length(self) -> int:
        return len(self.token_ids) - self.prompt_length

    def last_position(self, max_context: int) -> int:
        """Where max_tokens is 0, one token is chosen all the same, and dropped."""
        return min(self.prompt_length + max(self.stopping.max_tokens, 1), max_context) - 1

    def set_pages(self, first: int, pages: Iterable[int]) -> None:
        if first > len(self.pages):
            raise EngineFailed(f"sequence {self.key} has {len(self.pages)} pages, page {first} cannot follow them")
        if first < len(self.pages):
            del self.pages[first:]
            self.page_table_version += 1
        self.pages += pages


T = TypeVar("T")


class PerSequence(Generic[T]):
    """What an executor keeps of sequences, keyed by slot, because executors are not notified when a sequence ends."""

    def __init__(self, make: Callable[[SequenceState], T], *, paged: bool = False) -> None:
        """`paged`: made anew when pages of the sequence were replaced."""
        self._make = make
        self._paged = paged
        self._held: dict[int, tuple[SequenceState, int, T]] = {}

    def of(self, sequence: SequenceState) -> T:
        held = self._held.get(sequence.slot)
        version = sequence.page_table_version if self._paged else 0
        if held is None or held[0] is not sequence or held[1] != version:
            held = self._held[sequence.slot] = sequence, version, self._make(sequence)
        return held[2]

    def forget(self, sequence: SequenceState) -> None:
        self._held.pop(sequence.slot, None)


class SequenceTable:
    def __init__(self) -> None:
        self._held: dict[int, SequenceState] = {}

    def apply(self, plan: StepPlan) -> None:
        """Raises EngineFailed for a row that holds no slot."""
        held = self._held
        for released in plan.released:
            state = held.get(released.slot)
            if state is not None and state.key == released.key:
                del held[released.slot]
        for admitted in plan.admitted:
            held[admitted.slot] = begin(admitted)
        for row in plan.rows:
            state = held.get(row.slot)
            if state is None or state.key != row.key:
                raise EngineFailed(f"slot {row.slot} is not held by sequence {row.key}")
            if row.pages:
                state.set_pages(row.first_page, row.pages)

    def append(self, rows: Iterable[Row], results: Mapping[int, RowResult]) -> None:
        for row in rows:
            if row.sample:
                self._held[row.slot].token_ids += results[row.key].token_ids

    def of(self, row: Row) -> SequenceState:
        return self._held[row.slot]

    def at(self, slot: int) -> SequenceState:
        return self._held[slot]

    def states(self) -> tuple[SequenceState, ...]:
        return tuple(self._held.values())


def begin(admitted: Admitted) -> SequenceState:
    return SequenceState(
        key=admitted.key,
        slot=admitted.slot,
        token_ids=list(admitted.token_ids),
        prompt_length=admitted.prompt_length,
        sampling=admitted.sampling,
        stopping=admitted.stopping,
        logprobs=admitted.logprobs,
        draft_limit=admitted.draft_limit,
        constraint=admitted.constraint,
        prompt_logprobs=admitted.prompt_logprobs,
    )


def readmission(state: SequenceState) -> Admitted:
    """Recreates the sequence as it is now, the inverse of `begin`."""
    return Admitted(
        key=state.key,
        slot=state.slot,
        token_ids=tuple(state.token_ids),
        prompt_length=state.prompt_length,
        sampling=state.sampling,
        stopping=state.stopping,
        logprobs=state.logprobs,
        draft_limit=state.draft_limit,
        constraint=state.constraint,
        prompt_logprobs=state.prompt_logprobs,
    )
