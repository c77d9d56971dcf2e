"""Which sequences' tokens kernels choose, and which ids they may look up."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import Constraint, Stopping
from engine.errors import EngineFailed
from engine.execution.needs import MOST_STOPS, chosen_by_kernels, require_known
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
    ("changes", "plain", "masked"),
    [
        ({}, True, True),
        ({"stopping": stops(MOST_STOPS)}, True, True),
        ({"stopping": stops(MOST_STOPS + 1)}, False, False),
        ({"constraint": Constraint("start: /a/")}, False, True),
        ({"logprobs": 0}, False, False),
        ({"constraint": Constraint("start: /a/"), "logprobs": 1}, False, False),
    ],
)
def test_what_kernels_choose(changes: dict[str, Any], plain: bool, masked: bool) -> None:
    sequence = state(**changes)
    assert chosen_by_kernels(sequence) == plain
    assert chosen_by_kernels(sequence, masked=True) == masked


@pytest.mark.parametrize(("ids", "known"), [((), True), ((0, 7), True), ((8,), False), ((3, -1), False)])
def test_ids_outside_the_vocabulary_are_an_error(ids: tuple[int, ...], known: bool) -> None:
    if known:
        require_known(ids, 8)
        return
    with pytest.raises(EngineFailed, match="outside the vocabulary"):
        require_known(ids, 8)
