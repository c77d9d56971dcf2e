"""How deep drafts are: by acceptance and by what a step costs."""

from __future__ import annotations

import pytest

from engine.execution.speculation.control import Candidate, Control
from engine.execution.speculation.costs import SIZES, Costs, measure
from engine.execution.speculation.proposer import PromptLookup
from tests.engine.execution.speculation.test_proposer import state

FREE = Costs({1: 1.0, 512: 1.0})
LINEAR = Costs({1: 1.0, 2: 2.0, 4: 4.0})
GPU = Costs({1: 1.0, 2: 1.05, 4: 1.1, 8: 1.4, 16: 2.0, 32: 4.0})  # roughly what kernels that read weights cost


class Dear(PromptLookup):
    """Each of its tokens costs half a step."""

    name = "dear"

    def seconds(self, rows: int, depth: int) -> float:
        return 0.5 * depth


def play(control: Control, one: Candidate, right: float, tokens: int, rows: int = 1) -> int:
    """Draft tokens of so many steps, of which a share is right, evenly."""
    drafted, owed = 0, 0.0
    for _ in range(tokens):
        depth = control.depths([one], rows, rows)[0]
        drafted += depth
        accepted = 0
        while accepted < depth:
            owed += right
            if owed < 1:
                break
            owed -= 1
            accepted += 1
        if depth:
            control.observe(one, depth, accepted)
        one.sequence.token_ids += [0] * (accepted + 1)
    return drafted


def candidate(proposer: PromptLookup | None = None, most: int = 7, slot: int = 0) -> Candidate:
    return Candidate(state([1, 2, 3], slot), proposer or PromptLookup(), most)


def test_depth_grows_with_acceptance() -> None:
    found = []
    for right in (0.0, 0.5, 0.8, 1.0):
        control, one = Control(GPU), candidate()
        play(control, one, right, 100)
        found.append(play(control, one, right, 100))
    assert found == sorted(found)
    assert found[0] < 5, "what is never right is hardly tried"
    assert found[-1] > 600, "what is always right is drafted as deep as may be"


def test_wrong_guesses_are_tried_ever_less() -> None:
    control, one = Control(GPU), candidate()
    play(control, one, 0.0, 32)
    tries = [play(control, one, 0.0, 512) for _ in range(3)]
    assert tries[0] <= 8
    assert tries[-1] <= 2
    assert play(control, one, 1.0, 3000) > 3000, "what becomes right is found out"


def test_never_where_a_token_costs_a_step() -> None:
    control, one = Control(LINEAR), candidate()
    assert play(control, one, 1.0, 600) == 0
    control, one = Control(GPU), candidate(Dear())
    assert play(control, one, 0.3, 600) < 12
    control, one = Control(GPU), candidate(Dear())
    assert play(control, one, 1.0, 100) > 50, "even a dear guess pays if it is right"


def test_never_where_rows_are_no_longer_free() -> None:
    for rows, pays in ((1, True), (4, True), (32, False)):
        control = Control(GPU)
        wished = [candidate(slot=slot) for slot in range(rows)]
        assert any(control.depths(wished, rows, rows)) is pays


def test_those_who_have_no_draft_wait_little_longer() -> None:
    """One of eight speculates, and is always right: its step may take 5 % longer, and no more."""
    costs = Costs({1: 1.0, 8: 2.0, 9: 2.08, 10: 2.16, 16: 2.8})
    one, control = candidate(), Control(costs)
    for _ in range(50):
        depth = control.depths([one], 8, 8)[0]
        assert costs.seconds(8 + depth) <= 1.05 * costs.seconds(8)
        assert depth == 1
        control.observe(one, depth, depth)
        one.sequence.token_ids += [0] * (depth + 1)


def test_who_guesses_is_who_brings_most() -> None:
    """At equal acceptance the cheap one; where that is seldom right, the dear one, and the cheap one in its turns."""
    control, cheap = Control(GPU), candidate()
    other = Candidate(cheap.sequence, Dear(), 7)
    assert control.choose([cheap, other], 1, 1) is cheap
    for _ in range(30):
        control.observe(cheap, 7, 0)
        control.observe(other, 7, 7)
    chosen = []
    for _ in range(200):
        chosen.append(control.choose([cheap, other], 1, 1))
        cheap.sequence.token_ids.append(0)
    turns = [at for at, one in enumerate(chosen) if one is cheap]
    assert 2 <= len(turns) <= 4
    assert turns[0] > 60
    for _ in range(60):
        control.observe(cheap, 7, 7)
    assert control.choose([cheap, other], 1, 1) is cheap


def test_a_slot_that_changes_hands_begins_anew() -> None:
    control, one = Control(GPU), candidate()
    play(control, one, 0.0, 200)
    assert control.rate(one) < 0.2
    assert control.rate(candidate()) > 0.5


def test_costs_are_lines_between_what_was_measured() -> None:
    costs = Costs({1: 2.0, 2: 9.0, 4: 4.0, 8: 6.0})  # the second was disturbed
    assert [costs.seconds(tokens) for tokens in (1, 2, 4, 6, 8)] == [2.0, 4.0, 4.0, 5.0, 6.0]
    assert costs.seconds(16) == pytest.approx(12.0)
    assert costs.seconds(3) == 4.0
    assert Costs({1: 2.0}).seconds(3) == 6.0
    assert FREE.seconds(300) == 1.0


def test_measuring_ends_by_itself() -> None:
    now, steps = 0.0, []

    def step(size: int, before: int) -> None:
        assert size + before <= 8
        nonlocal now
        now += size * (3.0 if len(steps) < 3 else 1.0)
        steps.append(size)

    costs = measure(step, 8, lambda: now)
    assert set(steps) == {size for size in SIZES if size <= 8}
    assert costs.seconds(8) == 8.0
    assert costs.seconds(1) == 1.0


def test_what_is_done_between_steps_is_not_counted() -> None:
    now, done = 0.0, []

    def take(seconds: float, name: str) -> None:
        nonlocal now
        now += seconds
        done.append(name)

    costs = measure(lambda size, before: take(size, "step"), 8, lambda: now, lambda: take(100.0, "between"))
    assert costs.seconds(8) == 8.0
    timed = [at for at, name in enumerate(done) if name == "step" and at and done[at - 1] == "between"]
    first_calls = sum(size <= 8 for size in SIZES)
    assert len(timed) == done.count("between") == done.count("step") - first_calls
