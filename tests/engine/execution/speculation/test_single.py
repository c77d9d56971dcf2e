"""When a sequence that decodes alone is in rounds."""

from __future__ import annotations

from engine.api import GREEDY, Stopping
from engine.execution.pipeline import VerifiedDraft
from engine.execution.speculation.estimates import PaidDepths
from engine.execution.speculation.verifying import SinglePolicy
from engine.scheduling.plan import Admitted
from engine.scheduling.sequence_state import SequenceState, begin


class Said(PaidDepths):
    """Depths that a test sets."""

    def __init__(self) -> None:
        self.next = 0
        self.gone = 0
        self.held = False

    def depth(self, sequence: SequenceState) -> int:
        return self.next

    def most(self, sequence: SequenceState) -> int:
        return 7

    def observe(self, sequence: SequenceState, one: VerifiedDraft) -> None:
        """Nobody asks."""

    def worth(self, sequence: SequenceState, depth: int) -> bool:
        return True

    def holds(self, sequence: SequenceState) -> bool:
        return self.held

    def left(self, sequence: SequenceState) -> None:
        self.gone += 1


def answering(tokens: int) -> SequenceState:
    """A sequence with so many of its answer."""
    state = begin(Admitted(0, 0, (1, 2, 3), 3, GREEDY, Stopping(max_tokens=400)))
    state.token_ids += range(10, 10 + tokens)
    return state


def groups(alone: SinglePolicy, state: SequenceState, steps: int) -> list[int]:
    """Of so many steps, each of which brings a token."""
    found: list[int] = []
    for _ in range(steps):
        found.append(alone.group([state], continues=bool(found and found[-1])))
        state.token_ids.append(5)
    return found


def test_an_answer_begins_in_rounds_whether_or_not_there_is_a_draft() -> None:
    depths = Said()
    assert groups(SinglePolicy(depths, 64, 16), answering(1), 20) == [1] * 16 + [0] * 4
    assert depths.gone == 1


def test_who_has_plain_steps_under_way_goes_over_for_a_draft_alone() -> None:
    depths, state = Said(), answering(2)
    alone = SinglePolicy(depths, 64, 16)
    assert groups(alone, state, 3) == [0, 0, 0]
    depths.next = 3
    assert groups(alone, state, 1) == [4]


def test_a_draft_soon_after_the_beginning_is_in_rounds_already_and_stays_for_a_while() -> None:
    depths, state = Said(), answering(1)
    alone = SinglePolicy(depths, 30, 16)
    assert groups(alone, state, 5) == [1] * 5
    depths.next = 7
    assert alone.group([state], continues=True) == 8
    depths.next = 0
    after = [alone.group([state], continues=True)]
    while after[-1]:
        state.token_ids.append(5)
        after.append(alone.group([state], continues=True))
    assert after == [1] * 30 + [0]


def test_without_a_beginning_the_first_draft_begins_rounds() -> None:
    depths, state = Said(), answering(1)
    alone = SinglePolicy(depths, 64)
    assert groups(alone, state, 3) == [0, 0, 0]
    assert depths.gone == 0
    depths.next = 1
    assert groups(alone, state, 1) == [2]


def test_who_holds_on_has_short_drafts() -> None:
    depths, state = Said(), answering(1)
    depths.next = 3
    alone = SinglePolicy(depths, 0)
    assert groups(alone, state, 1) == [4]
    depths.next, depths.held = 0, True
    assert [alone.group([state], continues=True) for _ in range(3)] == [2, 2, 2]
    depths.held = False
    assert alone.group([state], continues=True) == 0
    assert depths.gone == 1


def test_the_next_sequence_has_a_beginning_of_its_own() -> None:
    alone = SinglePolicy(Said(), 64, 4)
    for _ in range(2):
        assert groups(alone, answering(1), 6) == [1, 1, 1, 1, 0, 0]
