"""Who may end an accepted run that was launched ahead, and where: on the make-believe device of `slow_rounds`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from engine.api import FinishReason
from tests.engine.execution.slow_device import answer, request
from tests.engine.execution.speculation.slow_verifying import MOST_CONTEXT, RoundsLife

PROMPT = [5, 6, 7]
TEXT = answer(request(PROMPT, max_tokens=140), MOST_CONTEXT, -1)[0]


def life_of(*prompts: Iterable[int], pages: int = 40, shared: bool = False, **stopping: object) -> RoundsLife:
    """Three at a time; all guesses are right, seven a round."""
    life = RoundsLife(7, pages, 40, -1, 1.0, (7,), 3, shared=shared)
    life.device.silence = 0.0
    for prompt in prompts:
        life.take(request(list(prompt), **{"max_tokens": 140, **stopping}))
    return life


def to_the_end(life: RoundsLife) -> None:
    while life.step():
        pass


@pytest.mark.parametrize("steps", range(1, 12))
def test_cancelled_while_rounds_are_under_way(steps: int) -> None:
    """What was told until then is right, and what comes after it goes to nobody."""
    life = life_of(PROMPT)
    for _ in range(steps):
        life.step()
    life.scheduler.cancel(0)
    life.take(request([8, 9], max_tokens=60))
    to_the_end(life)
    assert life.got[0] == TEXT[: len(life.got[0])]
    assert life.got[1] == answer(life.asked[1], MOST_CONTEXT, -1)[0]


@pytest.mark.parametrize("steps", range(1, 6))
def test_out_of_time_while_rounds_are_under_way(steps: int) -> None:
    life = life_of()
    life.take(replace(request(PROMPT, max_tokens=140), expires_at=1.0))
    for _ in range(steps):
        life.step()
    told = life.scheduler.expire(2.0)
    assert [event.finish.reason for event in told if event.finish] == [FinishReason.TIME_BUDGET]
    life.take(request([8, 9], max_tokens=60))
    to_the_end(life)
    assert life.got[0] == TEXT[: len(life.got[0])]
    assert life.got[1] == answer(life.asked[1], MOST_CONTEXT, -1)[0]


@pytest.mark.parametrize("pages", range(10, 16))
def test_pages_taken_away_from_a_row_in_rounds(pages: int) -> None:
    """Each needs nine in the end. The second comes while the first is in rounds."""
    life = life_of(PROMPT, pages=pages)
    for _ in range(2):
        life.step()
    life.take(request([8, 9], max_tokens=130))
    to_the_end(life)
    life.check()
    assert life.scheduler.load.preemptions > 0


def test_pages_of_an_accepted_run_are_found_by_the_next_request() -> None:
    for tokens in range(20, 40):
        life = life_of(PROMPT, shared=True, max_tokens=tokens)
        to_the_end(life)
        longer = [*PROMPT, *TEXT[: tokens + 1]]
        life.take(request(longer, max_tokens=20))
        to_the_end(life)
        assert life.cached[1] == (len(longer) - 2) // 16 * 16
        assert life.got[1] == TEXT[tokens + 1 : tokens + 21]


@pytest.mark.parametrize("neighbours", [False, True])
def test_switched_fifty_times(neighbours: bool) -> None:
    """While texts follow one another; with neighbours that come now and then, and end the rounds for a while."""
    life = life_of()
    for turn in range(50):
        life.speculate(turn % 4 > 1)  # a step to drain, and one of verifying launches
        if not life.scheduler.live:
            life.take(request([5, len(life.asked)], max_tokens=140))
        if neighbours and turn % 9 == 3:
            life.take(request([6, len(life.asked)], max_tokens=12))
        life.step()
    life.speculate(True)
    to_the_end(life)
    life.check()
    assert life.device.written > 5
