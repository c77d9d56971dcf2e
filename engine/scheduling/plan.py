"""The two messages between scheduler and runner: what a step is to do, and what came of it. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from cache.api import BlockLayout
from engine.api import ModelInfo, TokenLogprob
from engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: feed `sequence.token_ids[start:start + count]`, whose pages it already holds.

    Full pages before `start` may be shared with other sequences and be their work: the first row of a sequence may
    start anywhere on a page's border, and a later row of its prompt further on than the one before has ended. Pages
    that no row has reached yet may be exchanged for others between two rows.
    """

    sequence: Sequence  # to be read, never written, by the runner
    start: int  # first position; what lies before is in the page pool
    count: int  # tokens to feed, at least 1
    sample: bool  # whether the last of them is followed by a new token


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step is to do."""

    rows: tuple[Row, ...]
    # Slots whose owner changed since the last plan: forget what is kept for them (token counts, device state).
    fresh_slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row that sampled brought: one id or several, fewer or as many logprobs as ids.

    Several only as far as the sequence's pages reach: position start + count + len(token_ids) - 2 must be in them,
    since the keys and values of all new ids but the last count as computed. None at all: its logits were not finite,
    and this sequence alone fails.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry a row of the plan; None where the row did not sample."""

    rows: tuple[RowResult | None, ...]


class PageAccess(Protocol):
    """The bytes of full pages, one page after the other, in an order that `layout` names."""

    @property
    def layout(self) -> BlockLayout: ...

    def buffer(self, size: int) -> memoryview:
        """Host memory to fetch into."""

    def read(self, pages: Items[int], into: memoryview) -> None: ...

    def write(self, pages: Items[int], source: memoryview) -> None: ...


class Runner(Protocol):
    """Does steps: `engine.execution.runner` with torch, `engine.fake` without."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def pages(self) -> PageAccess: ...

    def run(self, plan: StepPlan) -> StepResult: ...

    def set_optimization(self, name: str, enabled: bool) -> None:
        """Raises Unsupported for a name it does not have."""

    def close(self) -> None: ...
