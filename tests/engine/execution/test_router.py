"""Which executor computes each row of a step: one table of cases, and the rules that hold in every case."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from engine.execution.needs import Needs
from engine.execution.router import (
    AHEAD,
    AHEAD_IN_TURN,
    FEW,
    NO_DRAFTS,
    Capacity,
    Drafts,
    Holders,
    Role,
    StepOptions,
    StepRows,
    route,
)
from engine.scheduling.plan import Assignment, Row, Share

GPU = Capacity(masked=8, verify=(1, 2, 4), few=2, prompts=True, many=512, drains_few=True)
CPU = Capacity()
K, M, S, MS = Needs.KERNELS, Needs.MASK, Needs.SAMPLER, Needs.MASKED_SAMPLER
ON, OFF = StepOptions(), StepOptions(fused_kernels=False)
FEW_0, FEW_1, VERIFY_1, VERIFY_2 = (
    (Role.FEW, 0),
    (Role.FEW, 1),
    (Role.VERIFY, 1),
    (Role.VERIFY, 2),
)


def decoding(*keys: int) -> tuple[Row, ...]:
    return tuple(Row(key, key, 20, 1, True) for key in keys)


def prompt(key: int, *, ends: bool = True, count: int = 9, score: bool = False) -> Row:
    return Row(key, key, 0, count, ends, score=score)


@dataclass(frozen=True)
class Case:
    """A step, and where its rows must go: (executor, keys) or (executor, keys, what else the share says)."""

    name: str
    rows: tuple[Row, ...]
    expected: tuple[tuple[Any, ...], ...]
    needs: tuple[tuple[int, Needs], ...] = ()  # of those whose tokens the kernels do not choose without a mask
    holders: tuple[tuple[int, tuple[Role, int]], ...] = ()
    capacity: Capacity = GPU
    options: StepOptions = ON
    drafts: Drafts = NO_DRAFTS

    def route(self) -> Assignment:
        needs = {row.key: K for row in self.rows} | dict(self.needs)
        return route(StepRows.of(self.rows, needs), needs, dict(self.holders), self.capacity, self.options, self.drafts)


def held(keys: range | tuple[int, ...], by: tuple[Role, int]) -> tuple[tuple[int, tuple[Role, int]], ...]:
    return tuple((key, by) for key in keys)


DRAIN = {"drain": True}
NINE = tuple(range(9))
NO_MANY = replace(GPU, many=0)
CASES = (
    Case("one row", decoding(0), ((Role.FEW, (0,), {"most_ahead": AHEAD}),)),
    Case("on a CPU eager does all", (*decoding(0), prompt(1)), ((Role.EAGER, (0, 1)),), capacity=CPU),
    Case("a prompt", (prompt(0),), ((Role.PROMPTS, (0,)),)),
    Case(
        "a prompt that ends beside a row: nothing further is launched ahead",
        (*decoding(0), prompt(1)),
        ((Role.FEW, (0,), {"most_ahead": 1}), (Role.PROMPTS, (1,))),
    ),
    Case(
        "a chunk of a prompt beside a row",
        (*decoding(0), prompt(1, ends=False)),
        ((Role.FEW, (0,), {"most_ahead": AHEAD}), (Role.PROMPTS, (1,))),
    ),
    Case(
        "a prompt's last token alone, which is not sampled",
        (prompt(0, count=1, ends=False),),
        ((Role.EAGER, (0,)),),
    ),
    Case("a prompt that is scored", (prompt(0, score=True),), ((Role.EAGER, (0,)),)),
    Case(
        "log-probabilities are eager's",
        decoding(0, 1),
        ((Role.FEW, (0,)), (Role.EAGER, (1,))),
        needs=((1, S),),
    ),
    Case("more than few rows, nothing in flight", decoding(*NINE), ((Role.MANY, NINE),)),
    Case(
        "few rows become many: those with launches in flight drain first",
        decoding(*NINE),
        ((Role.FEW, (0, 1, 2), DRAIN), (Role.MANY, NINE[3:])),
        holders=held(range(3), FEW_0),
    ),
    Case(
        "prompts come before many rows",
        (*decoding(*NINE), prompt(9)),
        ((Role.PROMPTS, (9,)), (Role.MANY, NINE)),
    ),
    Case("many rows become few", decoding(0, 1), ((Role.FEW, (0, 1)),)),
    Case(
        "more rows than one pipeline holds, where there is no batch",
        decoding(*NINE),
        (
            (Role.FEW, NINE[:8], {"pipeline": 0, "most_ahead": AHEAD_IN_TURN}),
            (Role.FEW, (8,), {"pipeline": 1, "most_ahead": AHEAD_IN_TURN}),
        ),
        holders=held(range(8), FEW_0),
        capacity=NO_MANY,
    ),
    Case(
        "each stays with the pipeline that holds it, others go to the emptiest",
        decoding(*range(10)),
        ((Role.FEW, (0, 1, 2, 7, 8), {"pipeline": 0}), (Role.FEW, (3, 4, 5, 6, 9), {"pipeline": 1})),
        holders=held(range(3), FEW_0) + held(range(3, 7), FEW_1),
        capacity=NO_MANY,
    ),
    Case(
        "more than two pipelines hold",
        decoding(*range(17)),
        ((Role.EAGER, tuple(range(17))),),
        capacity=NO_MANY,
    ),
    Case("a constraint takes plain rows along", decoding(0, 1), ((Role.MASKED, (0, 1)),), needs=((1, M),)),
    Case(
        "a constraint in a prompt as well",
        (*decoding(0), prompt(1)),
        ((Role.MASKED, (0,)), (Role.PROMPTS, (1,))),
        needs=((1, M),),
    ),
    Case(
        "rows of which one has a constraint, too many for masked steps",
        decoding(*NINE),
        ((Role.PROMPTS, (8,)), (Role.FEW, NINE[:8])),
        needs=((8, M),),
    ),
    Case(
        "a constraint and log-probabilities: the prompts' passes, which leave the choice to torch",
        decoding(0, 1),
        ((Role.FEW, (0,)), (Role.PROMPTS, (1,))),
        needs=((1, MS),),
    ),
    Case(
        "a constraint comes while plain steps are in flight: they are computed again",
        decoding(0, 1),
        ((Role.MASKED, (0, 1)),),
        needs=((1, M),),
        holders=held((0,), FEW_0),
    ),
    Case("a draft pays", decoding(0), ((Role.VERIFY, (0,), {"pipeline": 1, "group": 4}),), drafts=Drafts(4, 1)),
    Case(
        "a draft pays, and plain steps are long: they drain first",
        decoding(0),
        ((Role.FEW, (0,), DRAIN),),
        holders=held((0,), FEW_0),
        drafts=Drafts(4, 1),
    ),
    Case(
        "a draft pays, and plain steps are short: they are computed again",
        decoding(0),
        ((Role.VERIFY, (0,), {"pipeline": 1, "group": 4}),),
        holders=held((0,), FEW_0),
        capacity=replace(GPU, drains_few=False),
        drafts=Drafts(4, 1),
    ),
    Case(
        "verifying launches go on",
        decoding(0),
        ((Role.VERIFY, (0,), {"pipeline": 1, "group": 2}),),
        holders=held((0,), VERIFY_1),
        drafts=Drafts(2, 1, continues=True),
    ),
    Case("no draft pays any more", decoding(0), ((Role.VERIFY, (0,), DRAIN),), holders=held((0,), VERIFY_1)),
    Case(
        "another row joins: the one in verifying launches drains, the other takes a plain step",
        decoding(0, 1),
        ((Role.VERIFY, (0,), {"drain": True, "pipeline": 1}), (Role.FEW, (1,))),
        holders=held((0,), VERIFY_1),
        drafts=Drafts(4, 2),
    ),
    Case(
        "one of two ends: the other drains",
        decoding(0),
        ((Role.VERIFY, (0,), {"drain": True, "pipeline": 2}),),
        holders=held((0,), VERIFY_2),
        drafts=Drafts(4, 1),
    ),
    Case(
        "drafts beside a prompt",
        (*decoding(0), prompt(1)),
        ((Role.VERIFY, (0,), {"group": 4}), (Role.PROMPTS, (1,))),
        drafts=Drafts(4, 1),
    ),
    Case(
        "the kernels are switched off: what is in flight drains, eager does the rest",
        (*decoding(0, 1, 2), prompt(3)),
        ((Role.FEW, (0, 1), DRAIN), (Role.EAGER, (2, 3))),
        holders=held((0, 1), FEW_0),
        options=OFF,
    ),
    Case(
        "the kernels are switched off while drafts are verified",
        decoding(0),
        ((Role.VERIFY, (0,), DRAIN),),
        holders=held((0,), VERIFY_1),
        options=OFF,
    ),
    Case(
        "a row that was preempted and comes back has nothing in flight",
        (*decoding(0), prompt(1, count=40)),
        ((Role.FEW, (0,), {"most_ahead": 1}), (Role.PROMPTS, (1,))),
        holders=held((0,), FEW_0),
    ),
    Case(
        "eager verifies drafts of a whole step",
        (*decoding(0, 1), prompt(2)),
        ((Role.DRAFTED, (0, 1, 2), {"drafts": ((0, "prompt_lookup", 3),)}),),
        capacity=CPU,
        drafts=Drafts(depths=((0, "prompt_lookup", 3),)),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_where_the_rows_of_a_step_go(case: Case) -> None:
    found = case.route()
    shown = [(share.executor, tuple(row.key for row in share.rows)) for share in found.shares]
    assert sorted(shown) == sorted(one[:2] for one in case.expected)
    by_rows = {tuple(row.key for row in share.rows): share for share in found.shares}
    for _, keys, *says in case.expected:
        share = by_rows[keys]
        fields = {"drain": False} | (says[0] if says else {})
        assert {name: getattr(share, name) for name in fields} == fields
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Assignment) == found


_ROWS = some.lists(
    some.tuples(some.sampled_from((1, 1, 1, 5)), some.booleans(), some.booleans(), some.sampled_from(list(Needs))),
    max_size=20,
)
_CAPACITIES = some.builds(
    Capacity,
    masked=some.sampled_from((0, 8)),
    verify=some.sampled_from(((), (1,), (1, 2, 4))),
    few=some.sampled_from((0, 1, 2)),
    prompts=some.booleans(),
    many=some.sampled_from((0, 12, 512)),
    drains_few=some.booleans(),
)
ORDER = list(Role)


def drafts_of(capacity: Capacity, step: StepRows, holders: Holders, wanted: int, options: StepOptions) -> Drafts:
    """Drafts as an executor could propose them: within its pipelines, and going on only where it holds all rows."""
    most = next((most for most in capacity.verify if most >= len(step.decoding)), 0)
    masked = capacity.masked and step.has_mask
    if not (most and wanted and step.decoding and options.fused_kernels) or masked:
        return NO_DRAFTS
    continues = all(holders.get(row.key) == (Role.VERIFY, most) for row in step.decoding)
    return Drafts(wanted, most, continues)


@given(rows=_ROWS, capacity=_CAPACITIES, wanted=some.sampled_from((0, 2, 4)), kernels=some.booleans(), data=some.data())
def test_what_holds_of_every_assignment(
    rows: list[tuple[int, bool, bool, Needs]], capacity: Capacity, wanted: int, kernels: bool, data: some.DataObject
) -> None:
    plan = tuple(
        Row(key, key, 0, count, sample, score=score and count > 1) for key, (count, sample, score, _) in enumerate(rows)
    )
    needs = {key: need for key, (*_, need) in enumerate(rows)}
    step, options = StepRows.of(plan, needs), StepOptions(fused_kernels=kernels)
    places = [(Role.FEW, at) for at in range(capacity.few)] + [(Role.VERIFY, most) for most in capacity.verify]
    holders = {
        row.key: place
        for row in step.decoding
        if needs[row.key] is K and (place := data.draw(some.sampled_from([None, *places]))) is not None
    }
    drafts = drafts_of(capacity, step, holders, wanted, options)
    found = route(step, needs, holders, capacity, options, drafts)
    assert route(step, needs, holders, capacity, options, drafts) == found, "it is a function"
    shared = [row for share in found.shares for row in share.rows]
    assert sorted(row.key for row in shared) == sorted(row.key for row in plan), "each row is in one share"
    order = [ORDER.index(Role(share.executor)) for share in found.shares]
    assert order == sorted(order)
    for share in found.shares:
        assert share.rows
        check(share, capacity, needs, holders, kernels)


def check(share: Share, capacity: Capacity, needs: dict[int, Needs], holders: Holders, kernels: bool) -> None:
    """What an executor may be given."""
    count, kinds = len(share.rows), {needs[row.key] for row in share.rows}
    one_token = all(row.count == 1 and row.sample for row in share.rows)
    if share.drain:
        assert any(holders.get(row.key) == (share.executor, share.pipeline) for row in share.rows)
    elif share.executor != Role.EAGER:
        assert kernels, "without kernels nothing new is launched"
    match share.executor:
        case Role.MASKED:
            assert count <= capacity.masked
            assert kinds <= {K, M}
            assert one_token
        case Role.VERIFY:
            assert count <= share.pipeline
            assert share.pipeline in capacity.verify
            assert one_token
            assert share.drain or share.group
        case Role.FEW:
            assert count <= FEW
            assert share.pipeline < capacity.few
            assert kinds == {K}
            assert one_token
        case Role.MANY:
            assert count <= capacity.many
            assert kinds == {K}
            assert one_token
        case Role.PROMPTS:
            assert capacity.prompts
            assert all((row.count > 1 or needs[row.key] in (M, MS)) and not row.score for row in share.rows)
