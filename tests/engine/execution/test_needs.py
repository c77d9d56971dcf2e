"""Which sequences' tokens kernels choose, and which ids they may look up."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import Constraint, Stopping
from engine.errors import EngineFailed
from engine.execution.needs import MOST_STOPS, Needs, chosen_by_kernels, needs_of, require_known
from engine.fake import plain_request
from engine.kernels.tokens import MAX_STOPS
from engine.scheduling.sequence_state import SequenceState, SequenceTable
from tests.engine.stepped import holding, put


def state(**changes: Any) -> SequenceState:
    return put(SequenceTable(), holding(plain_request((1, 2), 4, **changes), [0]))


def stops(count: int) -> Stopping:
    return Stopping(max_tokens=4, stop_token_ids=tuple(range(count)))


def test_the_kernels_compare_with_as_many_stop_tokens() -> None:
    assert MOST_STOPS == MAX_STOPS


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Needs.KERNELS),
        ({"stopping": stops(MOST_STOPS)}, Needs.KERNELS),
        ({"stopping": stops(MOST_STOPS + 1)}, Needs.SAMPLER),
        ({"constraint": Constraint("start: /a/")}, Needs.MASK),
        ({"logprobs": 0}, Needs.SAMPLER),
        ({"constraint": Constraint("start: /a/"), "logprobs": 1}, Needs.MASKED_SAMPLER),
    ],
)
def test_who_can_choose_a_sequences_tokens(changes: dict[str, Any], expected: Needs) -> None:
    assert needs_of(state(**changes)) is expected
    assert chosen_by_kernels(state(**changes)) == (expected is Needs.KERNELS)


@pytest.mark.parametrize(("ids", "known"), [((), True), ((0, 7), True), ((8,), False), ((3, -1), False)])
def test_ids_outside_the_vocabulary_are_an_error(ids: tuple[int, ...], known: bool) -> None:
    if known:
        require_known(ids, 8)
        return
    with pytest.raises(EngineFailed, match="outside the vocabulary"):
        require_known(ids, 8)
