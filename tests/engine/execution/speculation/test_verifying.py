"""Rounds launched ahead, without a GPU: on a slow make-believe device."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as some

from engine.api import GREEDY, Stopping
from engine.errors import EngineFailed
from engine.execution.pipeline import VERIFY_AHEAD, Pipeline, verify_lookahead
from engine.execution.speculation.verifying import group_of
from engine.scheduling.plan import Admitted, Row, StepPlan
from engine.scheduling.sequence_state import SequenceTable
from tests.engine.execution.slow_device import SICK, SlowMemory, answer, request
from tests.engine.execution.speculation.slow_verifying import LAID, MOST_CONTEXT, RoundsLife, SlowRounds
from tests.properties import example_count


@pytest.mark.product
@given(
    seed=some.integers(0, 2**32),
    pages=some.integers(6, 30),
    ahead=some.sampled_from((0, 3, 31)),
    sick=some.sampled_from((-1, SICK)),
    chance=some.sampled_from((0.0, 0.5, 0.9, 1.0)),
    depths=some.sampled_from(((7,), (3,), (0, 1, 3, 7), (2, 5))),
)
@examples(max_examples=example_count(60))
def test_whatever_happens_each_answer_is_its_own(
    seed: int, pages: int, ahead: int, sick: int, chance: float, depths: tuple[int, ...]
) -> None:
    life = RoundsLife(seed, pages, ahead, sick, chance, depths)
    life.live(5)
    life.check()


def alone(chance: float, depths: Rows[int], lookahead: int = 40, **stopping: object) -> RoundsLife:
    life = RoundsLife(1, 40, lookahead, -1, chance, depths, 1)
    life.device.silence = 0.0
    life.take(request([5, 6, 7], **stopping))
    while life.step():
        pass
    life.check()
    return life


def test_a_lone_row_is_written_once_and_rounds_bring_their_tokens() -> None:
    life = alone(1.0, (7,), max_tokens=120)
    told = life.whims.told_of
    assert life.device.written == 1
    assert life.device.parked == 0
    # The first token was the prompt's, and the last round may have had no room for a draft.
    assert sum(one.accepted + 1 for one in told) in (118, 119)
    full = [one for one in told if one.proposed == 7]
    assert len(full) > 10
    assert all(one.accepted == one.proposed for one in told)


def test_wrong_drafts_cost_rounds_and_no_token() -> None:
    told = alone(0.0, (3,), max_tokens=60).whims.told_of
    assert len(told) == 58  # the first token was the prompt's, and the last round had no room for a draft
    assert {one.accepted for one in told} == {0}


def test_another_depth_needs_no_new_row() -> None:
    life = alone(0.7, (1, 3, 7), max_tokens=120)
    assert life.device.written == 1
    assert {one.proposed for one in life.whims.told_of} >= {1, 3, 7}


def test_rounds_stay_within_pages_that_come_one_by_one() -> None:
    life = alone(1.0, (7,), lookahead=0, max_tokens=120)
    assert life.device.parked == 0  # where no room is sure, what is under way is read first


@pytest.mark.parametrize("at", range(18, 30))
def test_a_stop_inside_an_accepted_run(at: int) -> None:
    ids, _ = answer(request([5, 6, 7], max_tokens=100), MOST_CONTEXT, -1)
    life = alone(1.0, (7,), max_tokens=100, stop_token_ids=(ids[at],))
    assert life.got[0] == ids[: ids.index(ids[at]) + 1]


@pytest.mark.parametrize("most", range(1, 20))
def test_max_tokens_inside_an_accepted_run(most: int) -> None:
    assert len(alone(1.0, (7,), max_tokens=most).got[0]) == most


def test_off_delivers_what_is_under_way_and_goes_on_alike() -> None:
    life = RoundsLife(1, 40, 40, -1, 0.3, (7,), 1)
    life.take(request([5, 6, 7], max_tokens=140))
    for at in range(60):
        life.speculate(at % 3 != 0)
        if not life.step():
            break
    while life.step():
        pass
    life.check()
    assert life.device.written > 3


def test_a_group_holds_no_longer_draft_than_asked_for() -> None:
    assert [group_of(depth) for depth in range(8)] == [1, 2, 4, 4, 8, 8, 8, 8]


@pytest.mark.parametrize(("depth", "rounds"), [(0, 8), (1, 8), (3, 8), (7, 8)])
def test_short_rounds_are_launched_further_ahead(monkeypatch: pytest.MonkeyPatch, depth: int, rounds: int) -> None:
    """So that the device has work until the host comes again; and never more than their pages may hold."""
    found = [verify_lookahead(seconds) for seconds in (1e-6, 100e-6, 300e-6, 1.0)]
    assert [(one.launches, one.tokens, one.pages) for one in found] == [
        (8, 64, 127),
        (5, 40, 79),
        (VERIFY_AHEAD, 16, 15),
        (VERIFY_AHEAD, 16, 15),
    ]
    device, table, row = (
        SlowRounds(1, SlowMemory(1, 9), -1, 1.0),
        SequenceTable(),
        Row(0, 0, 2, 1, True, 0, (*range(9),)),
    )
    asked = Admitted(0, 0, (5, 6, 7), 3, GREEDY, Stopping(max_tokens=140))
    table.apply(StepPlan(rows=(row,), admitted=(asked,)))
    monkeypatch.setattr(device, "poll", lambda index, number: None)
    pipeline = Pipeline(device, table, MOST_CONTEXT, buckets=(1,), sizes=(1,), settles=False)
    pipeline.lookahead = {1: verify_lookahead(1e-6)}
    with pytest.raises(EngineFailed, match="nothing is under way"):
        pipeline.step((row,), group=group_of(depth), most_drafts=(LAID - 1,))
    assert device.launched == rounds


def test_a_draft_is_made_again_only_where_pages_had_cut_it() -> None:
    """It costs the device a launch and the host a third of its turn."""
    assert alone(1.0, (7,), lookahead=127, max_tokens=120).device.cut == 0
    assert alone(1.0, (7,), lookahead=0, max_tokens=120).device.cut > 0


def test_a_device_without_an_end_is_told() -> None:
    life = RoundsLife(1, 40, 40, -1, 0.3, (7,), 1)
    life.take(request([5, 6, 7], max_tokens=140))
    life.step()
    life.step()
    life.device.queue.clear()
    life.device.ring.clear()
    with pytest.raises(EngineFailed, match="nothing is under way"):
        [life.step() for _ in range(200)]
