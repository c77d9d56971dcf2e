"""When several sequences go on in rounds together: by what they would have brought, or did, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

from msgspec.structs import replace

from engine.api import GREEDY, Stopping
from engine.execution.pipeline import VerifiedDraft
from engine.execution.speculation.costs import Costs
from engine.execution.speculation.estimates import DraftEstimate, LookupEstimate, PaidDepths
from engine.execution.speculation.proposer import PromptLookup
from engine.execution.speculation.verifying import SeveralPolicy
from engine.scheduling.plan import Admitted
from engine.scheduling.sequence_state import SequenceState, begin

MISTRAL = {1: 1.82, 2: 1.86, 3: 1.92, 4: 1.92}  # milliseconds of a plain step on an H100
ROUND = 2.55  # of eight rows
LOOP = [*range(10, 22)]


def sequence(slot: int, ids: Items[int] = (1, 2, 3), **changes: Any) -> SequenceState:
    limit = changes.pop("draft_limit", None)
    stopping = Stopping(max_tokens=changes.pop("max_tokens", 400))
    return begin(Admitted(slot, slot, tuple(ids), len(ids), replace(GREEDY, **changes), stopping, draft_limit=limit))


def chooser(group: int, seconds: float = ROUND) -> SeveralPolicy:
    return SeveralPolicy(group, seconds, MISTRAL.__getitem__, LookupEstimate(PromptLookup()))


def steps(choose: SeveralPolicy, texts: dict[int, Items[int]], states: Items[SequenceState]) -> int | None:
    """Plain steps until rounds begin; None: they never do."""
    for at in range(min(map(len, texts.values()))):
        if choose.group(states, continues=False):
            return at
        for state in states:
            state.token_ids.append(texts[state.slot][at])
    return None


def copying(tokens: int) -> list[int]:
    return (LOOP * tokens)[:tokens]


def fresh(tokens: int, first: int = 1000) -> list[int]:
    return [*range(first, first + tokens)]


def test_they_begin_soon_where_all_copy() -> None:
    for group, count in ((4, 2), (2, 3), (2, 4)):
        states = [sequence(slot, LOOP) for slot in range(count)]
        found = steps(chooser(group), dict.fromkeys(range(count), copying(60)), states)
        assert found is not None
        assert found < 12


def test_free_text_never_begins() -> None:
    states = [sequence(slot) for slot in range(2)]
    assert steps(chooser(4), {0: fresh(300), 1: fresh(300, 5000)}, states) is None


def test_who_copies_does_not_make_others_wait() -> None:
    """A round of eight rows takes 37 % longer than a step of two."""
    texts = {0: copying(300), 1: fresh(300)}
    assert steps(chooser(4), texts, [sequence(0, LOOP), sequence(1)]) is None
    found = steps(chooser(4, 1.9), texts, [sequence(0, LOOP), sequence(1)])
    assert found is not None, "at 2 % longer, they hardly wait"


def test_who_wants_no_draft_or_counts_tokens() -> None:
    texts = dict.fromkeys(range(2), copying(100))
    assert steps(chooser(4), texts, [sequence(0, LOOP), sequence(1, LOOP, draft_limit=0)]) is None
    assert steps(chooser(4, 1.9), texts, [sequence(0, LOOP), sequence(1, LOOP, draft_limit=0)]) is not None
    assert steps(chooser(4, 1.9), texts, [sequence(0, LOOP), sequence(1, LOOP, repetition_penalty=1.1)]) is None
    choose = chooser(4)
    assert [choose.most(sequence(0, draft_limit=limit)) for limit in (None, 0, 1, 2, 3, 50)] == [3, 0, 1, 2, 3, 3]


def test_dear_rounds_never_begin() -> None:
    states = [sequence(slot, LOOP) for slot in range(4)]
    assert steps(chooser(2, 4.0), dict.fromkeys(range(4), copying(200)), states) is None


def test_those_near_their_end_do_not_begin() -> None:
    states = [sequence(0, LOOP), sequence(1, LOOP, max_tokens=20)]
    assert steps(chooser(4), dict.fromkeys(range(2), copying(30)), states) is None


def test_rounds_that_bring_nothing_end_and_rest_ever_longer() -> None:
    choose, states = chooser(4), [sequence(slot, LOOP, max_tokens=10_000) for slot in range(2)]
    rests = []
    for _ in range(6):
        rests.append(steps(choose, dict.fromkeys(range(2), copying(2000)), states))
        rounds = 0
        while choose.group(states, continues=True):
            rounds += 1
            for state in states:
                choose.observe(state, VerifiedDraft(4, 3, 0))
                state.token_ids.append(7)
        assert 2 <= rounds < 30
    assert rests[0] is not None
    assert rests[0] < 12
    assert rests[1:] == sorted(rests[1:])
    assert rests[1] >= 32
    assert 512 <= rests[-1] < 600


def test_rounds_that_pay_go_on() -> None:
    choose, states = chooser(4), [sequence(slot, LOOP) for slot in range(2)]
    assert steps(choose, dict.fromkeys(range(2), copying(60)), states) is not None
    for at in range(100):
        assert choose.group(states, continues=True) == 4
        for state in states:
            choose.observe(state, VerifiedDraft(4, 3, 3 if at % 2 else 1))


def test_another_sequence_in_a_slot_is_a_new_one() -> None:
    choose, states = chooser(4), [sequence(slot, LOOP) for slot in range(2)]
    assert steps(choose, dict.fromkeys(range(2), copying(60)), states) is not None
    assert not choose.group([sequence(slot) for slot in range(2)], continues=False)


def drafting(group: int, behind: float = 0.0, seconds: float = ROUND) -> SeveralPolicy:
    """With a draft model, which needs so many milliseconds to catch up with a sequence."""
    depths = PaidDepths(Costs({1: 1.82, 8: 2.9}), PromptLookup(), lambda _: behind)
    return SeveralPolicy(group, seconds, MISTRAL.__getitem__, DraftEstimate(depths))


def rounds(choose: SeveralPolicy, states: Items[SequenceState], right: Items[int], most: int = 60) -> int:
    """Rounds until they end, of which each brings each sequence so many guesses that are right; `most`: they go on."""
    for done in range(most):
        if not choose.group(states, continues=True):
            return done
        for state, accepted in zip(states, right, strict=True):
            choose.observe(state, VerifiedDraft(4, choose.most(state), accepted))
            state.token_ids += [7] * (1 + accepted)
    return most


def test_a_draft_model_is_tried_at_once() -> None:
    for group, count in ((4, 2), (2, 3), (2, 4)):
        states = [sequence(slot) for slot in range(count)]
        choose = drafting(group)
        assert steps(choose, dict.fromkeys(range(count), fresh(9)), states) == 0
        assert rounds(choose, states, [group - 1] * count) == 60


def test_a_draft_model_that_is_wrong_rests_ever_longer() -> None:
    choose, states = drafting(4), [sequence(slot, max_tokens=10_000) for slot in range(2)]
    rests = []
    for _ in range(4):
        rests.append(steps(choose, {slot: fresh(2000) for slot in range(2)}, states))
        assert 1 <= rounds(choose, states, [0, 0]) < 8
    assert rests == [0, 128, 256, 512]


def test_one_for_whom_a_draft_model_is_wrong_does_not_wait_for_the_others() -> None:
    """A round of eight rows takes 37 % longer than a step of two."""
    choose, states = drafting(4), [sequence(slot) for slot in range(2)]
    assert steps(choose, {slot: fresh(9) for slot in range(2)}, states) == 0
    assert rounds(choose, states, [3, 0]) < 8


def test_who_wants_no_draft_of_a_model_is_not_drawn_into_rounds() -> None:
    states = [sequence(0), sequence(1, draft_limit=0)]
    assert steps(drafting(4), {slot: fresh(60) for slot in range(2)}, states) is None


def test_a_draft_model_that_is_far_behind_waits_until_it_is_worth_it() -> None:
    """In 64 tokens of each, rounds that bring 2.7 tokens save 59 ms of 119."""
    for behind, begins in ((1.0, True), (25.0, True), (35.0, False), (500.0, False)):
        states = [sequence(slot) for slot in range(2)]
        found = steps(drafting(4, behind), {slot: fresh(9) for slot in range(2)}, states)
        assert (found == 0) == begins, behind


def test_what_was_learned_of_a_sequence_alone_counts() -> None:
    depths = PaidDepths(Costs({1: 1.82, 8: 2.9}), PromptLookup(), lambda _: 0.0)
    choose = SeveralPolicy(4, ROUND, MISTRAL.__getitem__, DraftEstimate(depths))
    states = [sequence(slot) for slot in range(2)]
    for _ in range(20):
        depths.observe(states[0], VerifiedDraft(4, 3, 0))
    assert steps(choose, {slot: fresh(300) for slot in range(2)}, states) == 128, "it is tried all the same"


def test_rounds_of_short_steps_are_left_once_that_costs_no_more() -> None:
    """Two sequences whose rounds take 1.5 plain steps of 50 microseconds: of one that guesses nothing, each loses 25.
    To go back and come again takes 500, so it stays for 20."""
    costs = Costs({1: 50.0, 2: 50.0, 4: 75.0, 8: 75.0})
    choose = SeveralPolicy(4, 75.0, costs.seconds, LookupEstimate(PromptLookup()), turn=250.0)
    states = [sequence(slot) for slot in range(2)]
    assert rounds(choose, states, [3, 3]) == 60
    assert rounds(choose, states, [3, 0]) == 20
