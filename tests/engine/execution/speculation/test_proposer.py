"""Prompt lookup against the plain definition of what it looks for."""

from __future__ import annotations

import random

import pytest

from engine.execution.speculation.proposer import LONGEST, MOST_PLACES, SHORTEST, Draft, DraftRequest, PromptLookup
from engine.fake import plain_request
from engine.scheduling.rows import admission_of
from engine.scheduling.sequence_state import SequenceState, begin
from tests.engine.stepped import holding


def state(ids: list[int], slot: int = 0) -> SequenceState:
    return begin(admission_of(holding(plain_request(tuple(ids)), [0], slot)))


def plain(ids: list[int], most: int) -> Draft:
    """The longest match, the most recent of those, among the MOST_PLACES last of the last pair; it goes round."""
    last = len(ids)
    places = [at for at in range(SHORTEST, last) if ids[at - 2 : at] == ids[-2:]][::-1][:MOST_PLACES]
    best, found = 0, 0
    for at in places:
        length = max(n for n in range(SHORTEST, LONGEST + 1) if n <= at and ids[at - n : at] == ids[last - n :])
        if length > best:
            best, found = length, at
    if not found:
        return ()
    period = ids[found:]
    return tuple(period[at % len(period)] for at in range(most))


@pytest.mark.parametrize("alphabet", [2, 3, 8, 50])
def test_it_finds_what_the_definition_finds(alphabet: int) -> None:
    chance = random.Random(alphabet)
    lookup = PromptLookup()
    for round in range(20):
        ids = [chance.randrange(alphabet) for _ in range(chance.randrange(1, 30))]
        one = state(list(ids), slot=round % 3)  # slots change hands
        for _ in range(60):
            most = chance.randrange(1, 8)
            expected = plain(one.token_ids, most)
            assert (lookup.reach(one) > 0) == bool(expected)
            assert lookup.propose([DraftRequest(one, most)]) == [expected]
            one.token_ids += [chance.randrange(alphabet) for _ in range(chance.randrange(1, 5))]


def test_several_sequences_are_kept_apart() -> None:
    lookup = PromptLookup()
    one, two = state([1, 2, 3, 9, 1, 2], slot=0), state([1, 2, 5, 9, 1, 2], slot=1)
    assert lookup.propose([DraftRequest(one, 2), DraftRequest(two, 2)]) == [(3, 9), (5, 9)]


def test_a_period_goes_on() -> None:
    assert PromptLookup().propose([DraftRequest(state([7, 8] * 4), 7)]) == [(7, 8, 7, 8, 7, 8, 7)]
