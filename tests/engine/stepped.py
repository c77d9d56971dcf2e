"""Sequences put into slots by hand, for tests that feed a runner or an executor without a scheduler."""

from __future__ import annotations

from collections.abc import Iterable

from engine.api import GenerationRequest
from engine.scheduling.plan import Row, StepPlan
from engine.scheduling.rows import admission_of, row_of
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_state import SequenceState, SequenceTable


def holding(request: GenerationRequest, pages: Iterable[int], slot: int = 0, key: int | None = None) -> Sequence:
    """A sequence that holds a slot and these pages; its key is the slot's number unless said otherwise."""
    key = slot if key is None else key
    return Sequence(request, list(request.token_ids), slot=slot, pages=list(pages), key=key)


def step(*rows: Row, admitted: Iterable[Sequence] = ()) -> StepPlan:
    return StepPlan(rows, tuple(admission_of(one) for one in admitted))


def whole(one: Sequence, start: int = 0) -> Row:
    """All of its tokens from `start` on, followed by a new one."""
    return row_of(one, start, len(one.token_ids) - start, True)


def put(table: SequenceTable, one: Sequence) -> SequenceState:
    """Admits it to its slot with all its pages, so that rows of it need say nothing of them."""
    row = Row(one.key, one.slot, 0, 1, False, 0, tuple(one.pages))
    table.apply(StepPlan((row,), (admission_of(one),)))
    return next(state for state in table.states() if state.key == one.key)


def known(one: Sequence, start: int, count: int, sample: bool = True) -> Row:
    """A row of a sequence that was `put` into a table."""
    return Row(one.key, one.slot, start, count, sample)
