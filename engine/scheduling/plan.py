"""Defines the step as data: what a step is to do, and its result.

A plan refers to no live object, so it can be logged, replayed, and sent to several workers. Its parts are msgspec
structs, which take an eighth of a dataclass's time to build.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from typing import Protocol

import msgspec

from cache.api import BlockLayout
from engine.api import Constraint, ModelInfo, SamplingParams, Stopping, TokenLogprob


class Released(msgspec.Struct, frozen=True, array_like=True):
    """Releases an ended or preempted sequence's slot. No effect where the slot is another's."""

    key: int
    slot: int


class Admitted(msgspec.Struct, frozen=True, array_like=True):
    """Gives a sequence a slot, without a page. One that holds the slot begins anew."""

    key: int
    slot: int
    token_ids: tuple[int, ...]  # the prompt, and after a preemption what was generated before it
    prompt_length: int
    sampling: SamplingParams
    stopping: Stopping
    logprobs: int | None = None
    draft_limit: int | None = None  # draft tokens a step that the request allows; None: as many as pay
    constraint: Constraint | None = None
    prompt_logprobs: int | None = None


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A sequence's share of a step: feed its tokens [start, start + count).

    Full pages before `start` may be other sequences' work: the first row of a sequence may start on any page's border,
    and a later row of its prompt beyond the end of the row before. Pages that no row has reached yet may be exchanged
    between two rows.
    """

    key: int
    slot: int
    start: int  # first position; what lies before is in the page pool
    count: int  # tokens to feed, at least 1
    sample: bool  # whether the last of them is followed by a new token
    first_page: int = 0  # from this page on, the sequence's page table is `pages`, unless that is empty
    pages: tuple[int, ...] = ()
    score: bool = False  # how likely the successors of its tokens are, as far as they are part of the prompt, is wanted


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """Releases come before admissions. After a failed step both are repeated."""

    rows: tuple[Row, ...]
    admitted: tuple[Admitted, ...] = ()
    released: tuple[Released, ...] = ()


class RowEnd(enum.StrEnum):
    COMPLETE = "complete"  # nothing may follow
    STUCK = "stuck"  # something must follow, and no token is left for it
    COSTLY = "costly"  # the constraint took more time or memory than it may
    LATE = "late"  # not an end: the mask did not come in time, and the row has no token


class RowResult(msgspec.Struct, frozen=True, array_like=True):
    """Ids of a row that sampled or scored, and at most as many logprobs.

    Several ids only as far as the sequence's pages reach: position start + count + len(token_ids) - forced - 2 must be
    in them, since the keys and values of all new ids but the last and the forced ones count as computed. No ids: its
    logits were not finite, and this sequence alone fails, unless `end` states otherwise.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    draft_proposed: int = 0  # draft tokens that were verified for these ids
    draft_accepted: int = 0  # those of them that are among these ids
    forced: int = 0  # of the ids, the last ones: a constraint left no choice, and they are still to be fed
    end: RowEnd | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens from start + 1 on, where it scores

    def scored(self, logprobs: tuple[TokenLogprob, ...]) -> RowResult:
        return msgspec.structs.replace(self, prompt_logprobs=logprobs)


class Share(msgspec.Struct, frozen=True, array_like=True):
    """Rows that one executor computes, in the plan's order."""

    executor: str  # its name
    rows: tuple[Row, ...]
    pipeline: int = 0  # of the executor's, where it has several
    drain: bool = False  # the rows get what is in flight for them, at least one token each, and leave the pipeline
    group: int = 0  # rows of a sequence in verifying launches
    most_ahead: int = 8  # steps launched ahead of their tokens; 1: none that no row waits for
    drafts: tuple[tuple[int, str, int], ...] = ()  # for eager's pass: key of a row, proposer, tokens


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """Shares run in their order, and no row is in two of them."""

    shares: tuple[Share, ...]


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """One entry a key, for each row that sampled or scored."""

    rows: Mapping[int, RowResult]
    assignment: Assignment | None = None  # None: the runner has a single executor


class WrongResult(ValueError):
    """No part of the result was applied."""


class PageAccess(Protocol):
    """Reads and writes bytes of full pages, in an order that `layout` names."""

    @property
    def layout(self) -> BlockLayout: ...

    def buffer(self, size: int) -> memoryview:
        pass

    def read(self, pages: Items[int], into: memoryview) -> None: ...

    def write(self, pages: Items[int], source: memoryview) -> None: ...


class Runner(Protocol):
    """Implemented by `engine.execution.runner` with torch, by `engine.fake` without."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def pages(self) -> PageAccess: ...

    def run(self, plan: StepPlan, assignment: Assignment | None = None) -> StepResult:
        """`assignment`: as recorded, to be repeated."""

    def meanwhile(self, piece: Callable[[], bool]) -> None:
        """Sets work to repeat while waiting for a step: a short piece that raises nothing, True where it did any."""

    def set_optimization(self, name: str, enabled: bool) -> None:
        """Raises Unsupported for an unknown name."""

    def close(self) -> None: ...
