"""How long the drafts of captured rounds are: which rows may have any, and how acceptance and cost decide."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import Any

import pytest
from msgspec.structs import replace

from engine.api import GREEDY, Stopping
from engine.execution.pipeline import VerifiedDraft
from engine.execution.speculation.costs import Costs
from engine.execution.speculation.draft_model import DraftModel
from engine.execution.speculation.estimates import PaidDepths
from engine.execution.speculation.proposer import PromptLookup
from engine.scheduling.plan import Admitted
from engine.scheduling.sequence_state import SequenceState, begin

H100 = Costs({1: 504.0, 2: 542.0, 4: 597.0, 8: 723.0})  # microseconds of a round of Qwen3-0.6B


def sequence(ids: Ids[int] = (1, 2, 3, 4, 1, 2, 3), **changes: Any) -> SequenceState:
    stopping = Stopping(max_tokens=400, min_tokens=changes.pop("min_tokens", 0), stop_token_ids=(9,))
    limits = {name: changes.pop(name) for name in ("draft_limit", "logprobs") if name in changes}
    return begin(Admitted(0, 0, tuple(ids), len(ids), replace(GREEDY, **changes), stopping, **limits))


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 7),
        ({"temperature": 0.8, "top_p": 0.9, "top_k": 5}, 7),
        ({"logit_bias": ((3, 1.0),)}, 7),
        ({"draft_limit": 3}, 3),
        ({"draft_limit": 50}, 7),
        ({"draft_limit": 0}, 0),
        ({"logprobs": 2}, 0),
        ({"repetition_penalty": 1.1}, 0),
        ({"min_tokens": 5}, 0),
    ],
)
def test_who_may_have_how_long_a_draft(changes: dict[str, Any], most: int) -> None:
    state = sequence(**changes)
    depths = PaidDepths(H100, PromptLookup())
    assert depths.most(state) == most
    assert 0 <= depths.depth(state) <= most


def test_nothing_to_look_up_is_no_draft() -> None:
    assert PaidDepths(H100, PromptLookup()).depth(sequence(range(10))) == 0


def test_right_drafts_grow_and_wrong_ones_end() -> None:
    depths, state = PaidDepths(H100, PromptLookup()), sequence()
    for _ in range(20):
        depths.observe(state, VerifiedDraft(8, 7, 7))
    assert depths.depth(state) == 7
    for _ in range(60):
        depths.observe(state, VerifiedDraft(8, 7, 0))
    assert depths.depth(state) == 0


def test_dear_rounds_are_not_worth_a_draft() -> None:
    assert PaidDepths(Costs({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}), PromptLookup()).depth(sequence()) == 0


class Eager(DraftModel):
    """A draft model that always has a guess."""

    def __init__(self) -> None:
        """Without weights."""

    def reach(self, sequence: SequenceState) -> int:
        return 7

    def seconds(self, rows: int, depth: int) -> float:
        return 0.0


def behind(seconds: float) -> PaidDepths:
    """With a draft model that takes so many seconds to catch up."""
    return PaidDepths(H100, Eager(), lambda sequence: seconds)


def test_a_draft_model_begins_where_it_is_soon_won_back() -> None:
    """Of 64 tokens, at 75 % a guess and three guesses, some 290 microseconds each are saved."""
    state = sequence(range(9))
    assert behind(5_000.0).worth(state, 3)
    assert not behind(50_000.0).worth(state, 3)
    short = begin(Admitted(0, 0, (1, 2), 2, GREEDY, Stopping(max_tokens=4)))
    assert not behind(5_000.0).worth(short, 3)
    assert PaidDepths(H100, PromptLookup()).worth(short, 3), "a lookup costs nothing"


def test_who_comes_and_goes_spends_little_of_the_time_on_it() -> None:
    """A draft model that pays by turns: each catching up is at most 3 % of the plain steps since the last."""
    depths, state = behind(5_000.0), sequence(range(9))
    assert depths.worth(state, 7)
    begun = []
    for _ in range(3000):
        if depths.worth(state, 7):
            begun.append(len(state.token_ids))
            depths.left(state)
        state.token_ids.append(1)
    assert 5 <= len(begun) <= 1 + 3000 * 504 * 0.03 / 5000
    depths.left(state)
    assert not depths.worth(state, 7)
    assert depths.worth(sequence(range(9)), 7), "another sequence begins anew"


def short_steps(turn: float = 250.0, passes: float = 110.0) -> PaidDepths:
    """The demo pair on an H100, microseconds: as long as the host does not come by, the device has nothing to do."""
    costs = Costs({1: 59.0, 2: 79.0, 4: 120.0, 8: 212.0})
    return PaidDepths(costs, Eager(), lambda sequence: passes, turn)


def test_short_steps_are_left_for_rounds_where_the_host_s_turns_are_won_back_too() -> None:
    state = sequence(range(9))
    assert short_steps().worth(state, 3), "before an answer there are no plain steps"
    state.token_ids += [5, 5]
    assert short_steps().worth(state, 3)
    assert not short_steps(turn=500.0).worth(state, 3)
    state.token_ids += [5] * 1300
    assert short_steps(turn=500.0).worth(state, 3), "little beside what has been done"


def test_rounds_that_lose_a_little_are_held_on_to() -> None:
    """As long as they have lost no more than it takes to go back and come again; what they win is no credit."""
    depths, state = short_steps(), sequence(range(9))
    assert depths.worth(state, 3)
    for _ in range(20):
        depths.observe(state, VerifiedDraft(2, 1, 1))
    wrong = 0
    while depths.holds(state):
        depths.observe(state, VerifiedDraft(2, 1, 0))
        wrong += 1
    assert wrong == 31  # of 20 microseconds each, 610 in all
    depths.observe(state, VerifiedDraft(2, 1, 1))
    assert depths.holds(state), "one that was right makes up for two that were not"


def test_who_tries_again_has_paid_for_it_before() -> None:
    """Coming and going, and as much lost meanwhile: at most 3 % of the plain steps since the last try."""
    depths, state, tries = short_steps(), sequence(range(9)), []
    assert depths.worth(state, 3)
    depths.left(state)
    for _ in range(4000):
        state.token_ids.append(1)
        if depths.worth(state, 1):
            tries.append(len(state.token_ids))
            while depths.holds(state):
                depths.observe(state, VerifiedDraft(2, 1, 0))
            depths.left(state)
    assert 4 <= len(tries) <= 4000 * 59 * 0.03 / (2 * 610)


def test_a_lookup_holds_on_to_nothing() -> None:
    assert not PaidDepths(H100, PromptLookup()).holds(sequence())


def test_a_draft_model_that_is_never_right_begins_no_further_answer() -> None:
    """By what other sequences have told; those of a good one begin with the same hope as ever."""
    wrong, right = short_steps(), short_steps()
    for _ in range(40):
        wrong.observe(sequence(range(9)), VerifiedDraft(4, 3, 0))
        right.observe(sequence(range(9)), VerifiedDraft(4, 3, 3))
    state = sequence(range(9))
    assert wrong.depth(state) == 0
    assert right.depth(state) == short_steps().depth(state) > 0
    looked_up = PaidDepths(H100, PromptLookup())
    for _ in range(40):
        looked_up.observe(sequence(), VerifiedDraft(4, 3, 0))
    other = sequence()
    assert looked_up.depth(other) > 0, "what one text repeats says nothing of another"
