"""Decides which executor computes each row of a step, and which rows change hands. Torch-free.

`route` is pure. Rows that leave a pipeline with launches in flight (`holders`) either drain it first, in a step of
their own, or have these tokens computed again. An `Assignment` is recorded with the plan, and a replay follows it.

Shares run in order: prompts behind few rows that decode, so that their passes stand behind what is launched ahead; many
rows that decode behind prompts, so that their launches are in flight while the host takes in the step.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from engine.execution.needs import Needs, needs_of
from engine.scheduling.plan import Assignment, Row, Share, StepPlan
from engine.scheduling.sequence_state import SequenceTable

FEW = 8  # rows of a pipeline for few rows
AHEAD = 8  # most steps that such a pipeline launches ahead of their tokens
AHEAD_IN_TURN = 2  # the same, where two pipelines take turns on the device
Rows = tuple[Row, ...]


class Role(enum.StrEnum):
    """Names executors in the order in which they compute their shares."""

    DRAFTED = "speculation"
    MASKED = "constrained"
    VERIFY = "captured_speculation"
    FEW = "graph_decode"
    PROMPTS = "graph_prefill"
    MANY = "batched"
    EAGER = "eager"


class StepOptions(msgspec.Struct, frozen=True, array_like=True):
    """Names optimizations of a step, on which its tokens do not depend."""

    fused_kernels: bool = True  # False: eager computes every row
    graphs: bool = True  # False: kernels are launched one by one
    speculation: bool = True
    two_pass_head: bool = True  # False: every row of the head is read


ALL_OPTIONS = StepOptions()


@dataclass(frozen=True, slots=True)
class Capacity:
    masked: int = 0  # rows
    verify: tuple[int, ...] = ()  # most sequences of each pipeline, fewest first
    few: int = 0  # pipelines of FEW rows each
    prompts: bool = False
    many: int = 0  # rows
    drains_few: bool = False  # rows drain their plain steps before they go on in verifying ones


class Drafts(msgspec.Struct, frozen=True, array_like=True):
    group: int = 0  # rows of each sequence in verifying launches; 0: the rows go on in plain steps
    pipeline: int = 0  # of those that verify
    continues: bool = False  # that pipeline holds these rows, and no others
    depths: tuple[tuple[int, str, int], ...] = ()  # for eager: key, proposer, tokens


NO_DRAFTS = Drafts()
Holders = Mapping[int, tuple[Role, int]]  # key of a row with launches in flight → executor, and number of its pipeline


class StepRows(NamedTuple):
    """Groups the rows of a step, each kind in the plan's order."""

    all: Rows
    decoding: Rows  # one token is fed and one is chosen
    others: Rows
    kernels: Rows  # of those that decode: the kernels choose the token, without a mask
    has_mask: bool  # the kernels need a mask for some row, decoding or not
    prompt_ends: bool

    @classmethod
    def of(cls, rows: Rows, needs: Mapping[int, Needs]) -> StepRows:
        kernels, mask = Needs.KERNELS, Needs.MASK
        decoding, others, plain, has_mask, prompt_ends = [], [], [], False, False
        for row in rows:
            need = needs[row.key]
            if need is mask:
                has_mask = True
            if row.count == 1 and row.sample and not row.score:
                decoding.append(row)
                if need is kernels:
                    plain.append(row)
            else:
                others.append(row)
                prompt_ends = prompt_ends or row.sample
        return cls(rows, tuple(decoding), tuple(others), tuple(plain), has_mask, prompt_ends)


@runtime_checkable
class LaunchesAhead(Protocol):
    def in_flight(self, rows: Rows) -> Mapping[int, int]:
        """Returns key → pipeline of rows that launches in flight move on from where the plan takes them up."""


@runtime_checkable
class Proposes(Protocol):
    def drafts(self, step: StepRows) -> Drafts:
        """Changes nothing about the rows that the executor holds."""


def route(
    step: StepRows,
    needs: Mapping[int, Needs],
    holders: Holders,
    capacity: Capacity,
    options: StepOptions = ALL_OPTIONS,
    drafts: Drafts = NO_DRAFTS,
) -> Assignment:
    """Puts every row into exactly one share."""
    if drafts.depths:
        return Assignment((Share(Role.DRAFTED, step.all, drafts=drafts.depths),))
    shares: list[Share] = []
    if options.fused_kernels:
        shares += _masked(step, needs, capacity)
    shares += _verifying(_without(step.decoding, shares), step, holders, capacity, drafts)
    shares += _few(_without(step.decoding, shares), step, holders, capacity, options)
    if options.fused_kernels:
        shares += _prompts(step, needs, capacity, shares)
        many = _without(step.kernels, shares)[: capacity.many]
        if many:
            shares.append(Share(Role.MANY, many))
    if sum(len(share.rows) for share in shares) < len(step.all):
        shares.append(Share(Role.EAGER, _without(step.all, shares)))
    return Assignment(tuple(shares))


_CONSTRAINED = (Needs.MASK, Needs.MASKED_SAMPLER)


def _masked(step: StepRows, needs: Mapping[int, Needs], capacity: Capacity) -> list[Share]:
    """Takes rows without a mask along, so that the step stays one launch."""
    if not (capacity.masked and step.has_mask):
        return []
    mine = tuple(row for row in step.decoding if needs[row.key] in (Needs.KERNELS, Needs.MASK))
    return [Share(Role.MASKED, mine)] if 0 < len(mine) <= capacity.masked else []


def _verifying(decoding: Rows, step: StepRows, holders: Holders, capacity: Capacity, drafts: Drafts) -> list[Share]:
    """All rows that decode go on in verifying launches, or none. Where rows join, leave or stop drafting, those in such
    launches drain: accepted drafts are too dear to compute again."""
    held = [row for row in decoding if _holder_of(holders, row) is Role.VERIFY] if holders else []
    if held and not drafts.continues:
        pipeline = holders[held[0].key][1]
        return [Share(Role.VERIFY, tuple(held), pipeline, drain=True)]
    if not (drafts.group and decoding):
        return []
    from_few = any(_holder_of(holders, row) is Role.FEW for row in decoding)
    if from_few and capacity.drains_few and len(decoding) <= FEW and len(step.kernels) == len(decoding):
        return [Share(Role.FEW, decoding, drain=True)]
    return [Share(Role.VERIFY, decoding, drafts.pipeline, group=drafts.group)]


def _few(decoding: Rows, step: StepRows, holders: Holders, capacity: Capacity, options: StepOptions) -> list[Share]:
    """Up to FEW rows are the first pipeline's. More rows drain these pipelines and go on among many, or, where no
    executor takes many, share two pipelines."""
    if not capacity.few:
        return []
    mine = decoding if len(step.kernels) == len(step.decoding) else _only(decoding, step.kernels)
    if not options.fused_kernels or (len(mine) > FEW and capacity.many):
        return _drained(mine, holders, Role.FEW)
    if len(mine) > FEW * capacity.few or not mine:
        return []
    if len(mine) <= FEW:
        return [Share(Role.FEW, mine, most_ahead=1 if step.prompt_ends else AHEAD)]
    homes = _homes(mine, holders, capacity.few)
    return [
        Share(Role.FEW, own, at, most_ahead=1 if step.prompt_ends else AHEAD_IN_TURN)
        for at in range(capacity.few)
        if (own := tuple(row for row, home in zip(mine, homes, strict=True) if home == at))
    ]


def _prompts(step: StepRows, needs: Mapping[int, Needs], capacity: Capacity, shares: Collection[Share]) -> list[Share]:
    """Also takes constrained rows of one token that no share has: their token must be known before the next step."""
    if not capacity.prompts or len(step.kernels) == len(step.all):
        return []
    left = _without(step.all, shares)
    mine = tuple(row for row in left if not row.score and (row.count > 1 or needs[row.key] in _CONSTRAINED))
    return [Share(Role.PROMPTS, mine)] if mine else []


def _drained(rows: Rows, holders: Holders, name: Role) -> list[Share]:
    by_pipeline: dict[int, list[Row]] = {}
    for row in rows if holders else ():
        if _holder_of(holders, row) is name:
            by_pipeline.setdefault(holders[row.key][1], []).append(row)
    return [Share(name, tuple(own), at, drain=True) for at, own in by_pipeline.items()]


def _homes(rows: Rows, holders: Holders, pipelines: int) -> list[int]:
    """Keeps rows in their pipelines, and gives others to the emptiest."""
    homes = [holders[row.key][1] if _holder_of(holders, row) is Role.FEW else None for row in rows]
    counts = [homes.count(at) for at in range(pipelines)]
    found = []
    for home in homes:
        if home is None:
            home = counts.index(min(counts))
            counts[home] += 1
        found.append(home)
    return found


def _holder_of(holders: Holders, row: Row) -> Role | None:
    held = holders.get(row.key)
    return None if held is None else held[0]


def _without(rows: Rows, shares: Collection[Share]) -> Rows:
    if not shares or not rows:
        return rows
    taken = {row.key for share in shares for row in share.rows}
    return tuple(row for row in rows if row.key not in taken)


def _only(rows: Rows, kept: Rows) -> Rows:
    keys = {row.key for row in kept}
    return tuple(row for row in rows if row.key in keys)


class Executors(NamedTuple):
    ahead: Mapping[Role, LaunchesAhead]  # that rows may have to drain
    verify: Proposes | None = None  # in captured graphs
    drafted: Proposes | None = None  # in eager's pass


class Router:
    """Remembers only the needs of the sequences that hold slots."""

    def __init__(self, sequences: SequenceTable, capacity: Capacity, executors: Executors) -> None:
        self._sequences = sequences
        self._capacity = capacity
        self._executors = executors
        self._needs: dict[int, Needs] = {}  # by key

    def assign(self, plan: StepPlan, options: StepOptions) -> Assignment:
        """The sequence table must have applied the plan."""
        for released in plan.released:
            self._needs.pop(released.key, None)
        for admitted in plan.admitted:
            self._needs[admitted.key] = needs_of(self._sequences.at(admitted.slot))
        if not plan.rows:
            return Assignment(())
        step = StepRows.of(plan.rows, self._needs)
        drafts = self._drafts(step, options)
        return route(step, self._needs, self._holders(step, options, drafts), self._capacity, options, drafts)

    def _holders(self, step: StepRows, options: StepOptions, drafts: Drafts) -> Holders:
        """Leaves out few rows that stay few, whose holder makes no difference."""
        stay = len(step.decoding) <= FEW and options.fused_kernels and not drafts.group
        found: dict[int, tuple[Role, int]] = {}
        if not step.decoding:
            return found
        for name, executor in self._executors.ahead.items():
            if name is Role.FEW and stay:
                continue
            for key, pipeline in executor.in_flight(step.decoding).items():
                found[key] = name, pipeline
        return found

    def _drafts(self, step: StepRows, options: StepOptions) -> Drafts:
        verify, drafted = self._executors.verify, self._executors.drafted
        if not (options.speculation and step.decoding):
            return NO_DRAFTS
        if drafted is not None:
            return drafted.drafts(step)
        masked = self._capacity.masked and step.has_mask
        if verify is None or masked or not options.fused_kernels or len(step.decoding) > self._capacity.verify[-1]:
            return NO_DRAFTS
        return verify.drafts(step)
