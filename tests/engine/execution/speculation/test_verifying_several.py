"""Several sequences in one round, without a GPU: they stand unequally far, and end apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as some
from msgspec.structs import replace

from engine.api import FinishReason
from tests.engine.execution.slow_device import SICK, answer, request
from tests.engine.execution.speculation.slow_verifying import LAID, MOST_CONTEXT, RoundsLife
from tests.properties import example_count

PROMPTS = [5, 6, 7], [8, 9], [1], [2, 3, 4, 5, 6]


@pytest.mark.product
@given(
    seed=some.integers(0, 2**32),
    pages=some.integers(12, 60),
    ahead=some.sampled_from((0, 3, 31)),
    sick=some.sampled_from((-1, SICK)),
    chance=some.sampled_from((0.0, 0.5, 0.9, 1.0)),
    together=some.sampled_from(((), (2,), (2, 4), (4,))),
    drafted=some.booleans(),
    shared=some.booleans(),
    waits=some.booleans(),
)
@examples(max_examples=example_count(80))
def test_whatever_happens_each_answer_is_its_own(
    seed: int,
    pages: int,
    ahead: int,
    sick: int,
    chance: float,
    together: Sequence[int],
    drafted: bool,
    shared: bool,
    waits: bool,
) -> None:
    how: dict[str, Any] = {"together": together, "drafted": drafted, "shared": shared, "waits": waits}
    life = RoundsLife(seed, pages, ahead, sick, chance, (0, 3, 7), 4, **how)
    life.live(6)
    life.check()


def life_of(
    sequences: int, prompts: Iterable[list[int]] | None = None, chance: float = 0.8, pages: int = 60, **stopping: object
) -> RoundsLife:
    """So many at a time, which go on together as long as nobody comes or goes; silent for nobody."""
    life = RoundsLife(3, pages, 40, -1, chance, (7,), 4, together=(2, 4), sequences=sequences)
    for most in (2, 4):
        life.devices[most].silence, life.choosers[most].stays = 0.0, 1.0
    for prompt in PROMPTS[:sequences] if prompts is None else prompts:
        life.take(request(prompt, **{"max_tokens": 120, **stopping}))
    return life


def to_the_end(life: RoundsLife) -> None:
    while life.step():
        pass
    life.check()


def told_of(life: RoundsLife, sequences: int) -> list[int]:
    """Tokens that rounds for so many brought each."""
    found = [0] * sequences
    for key, one in life.choosers[2 if sequences == 2 else 4].told_of:
        found[key] += 1 + one.accepted
    return found


@pytest.mark.parametrize("sequences", [2, 3, 4])
@pytest.mark.parametrize("chance", [0.0, 0.8, 1.0])
def test_they_go_on_together_and_are_written_once(sequences: int, chance: float) -> None:
    life = life_of(sequences, chance=chance)
    to_the_end(life)
    device = life.devices[2 if sequences == 2 else 4]
    assert device.parked == 0
    assert device.written <= 2, "all at once, as long as the same go on"
    assert all(tokens > 20 for tokens in told_of(life, sequences)), "no row is left behind"


def test_who_asks_for_no_draft_rides_with_one_useful_row() -> None:
    life = life_of(3, chance=1.0)
    to_the_end(life)
    alone = [one for key, one in life.choosers[4].told_of if key == 2]
    assert alone
    assert {one.proposed for one in alone} == {0}
    assert max(one.proposed for key, one in life.choosers[4].told_of if key != 2) == LAID // 4 - 1


@pytest.mark.parametrize("sequences", [2, 4])
@pytest.mark.parametrize("at", range(18, 30, 2))
def test_a_stop_of_one_inside_an_accepted_run(sequences: int, at: int) -> None:
    """The others go on as if it had never been there."""
    ids, _ = answer(request(PROMPTS[1], max_tokens=100), MOST_CONTEXT, -1)
    life = life_of(sequences, [], chance=1.0)
    for key, prompt in enumerate(PROMPTS[:sequences]):
        life.take(request(prompt, max_tokens=100, stop_token_ids=(ids[at],) if key == 1 else ()))
    to_the_end(life)
    assert life.got[1] == ids[: ids.index(ids[at]) + 1]
    assert all(len(life.got[key]) == 100 for key in range(sequences) if key != 1)


@pytest.mark.parametrize("sequences", [2, 4])
@pytest.mark.parametrize("most", range(33, 41))
def test_max_tokens_of_each_inside_an_accepted_run(sequences: int, most: int) -> None:
    life = life_of(sequences, [], chance=1.0)
    for key, prompt in enumerate(PROMPTS[:sequences]):
        life.take(request(prompt, max_tokens=most + 5 * key))
    to_the_end(life)
    assert [len(got) for got in life.got] == [most + 5 * key for key in range(sequences)]


@pytest.mark.parametrize("sequences", [2, 4])
@pytest.mark.parametrize("steps", range(3, 8))
def test_one_is_cancelled_or_out_of_time(sequences: int, steps: int) -> None:
    """What was told until then is right, what comes after it goes to nobody, and another takes the place."""
    life = life_of(sequences, [])
    for key, prompt in enumerate(PROMPTS[:sequences]):
        asked = request(prompt, max_tokens=140)
        life.take(replace(asked, expires_at=1.0) if key == 0 else asked)
    for _ in range(steps):
        life.step()
    if steps % 2:
        life.scheduler.cancel(0)
    else:
        told = life.scheduler.expire(2.0)
        assert [event.finish.reason for event in told if event.finish] == [FinishReason.TIME_BUDGET]
    life.gone.add(0)
    life.take(request([9, 9, 9], max_tokens=60))
    to_the_end(life)


@pytest.mark.parametrize("sequences", [2, 4])
def test_pages_taken_away_from_one(sequences: int) -> None:
    """Each needs nine in the end."""
    preempted = 0
    for pages in range(7 * sequences - 3, 8 * sequences):
        life = life_of(sequences, chance=1.0, pages=pages)
        to_the_end(life)
        preempted += life.scheduler.load.preemptions
    assert preempted > 0


@pytest.mark.parametrize("sequences", [2, 4])
def test_pages_come_one_by_one(sequences: int) -> None:
    """Where no room is sure for one, what is under way for all is read first."""
    life = RoundsLife(3, 60, 0, -1, 1.0, (7,), 4, together=(2, 4), sequences=sequences)
    for prompt in PROMPTS[:sequences]:
        life.take(request(prompt, max_tokens=120))
    to_the_end(life)
    assert all(device.parked == 0 for device in life.devices.values())


@pytest.mark.parametrize("sequences", [2, 4])
def test_pages_of_accepted_runs_are_found_by_the_next_request(sequences: int) -> None:
    for tokens in range(34, 50, 3):
        life = RoundsLife(3, 60, 40, -1, 1.0, (7,), 4, together=(2, 4), sequences=sequences, shared=True)
        for prompt in PROMPTS[:sequences]:
            life.take(request(prompt, max_tokens=tokens))
        to_the_end(life)
        for prompt, got in zip(PROMPTS[:sequences], [*life.got], strict=True):
            life.take(request([*prompt, *got, 1], max_tokens=20))
        to_the_end(life)
        for key, prompt in enumerate(PROMPTS[:sequences]):
            assert life.cached[sequences + key] == (len(prompt) + tokens - 1) // 16 * 16


@pytest.mark.parametrize("sequences", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_computed_twice_on_the_way_to_rounds_and_back(sequences: int, seed: int) -> None:
    """Each plain step brought every row a token, as often as they go over."""
    life = RoundsLife(seed, 60, 40, -1, 0.5, (7,), 4, together=(2, 4), sequences=sequences)
    for prompt in PROMPTS[:sequences]:
        life.take(request(prompt, max_tokens=120))
    turn = 0
    while life.step():
        turn += 1
        life.speculate(turn % 12 > 6)
    life.check()
    told = [*life.whims.told_of, *(one for chooser in life.choosers.values() for _, one in chooser.told_of)]
    in_rounds = sum(1 + one.accepted for one in told)
    made = sum(map(len, life.got)) - sequences  # but for the prompts' own
    assert min(in_rounds, made - in_rounds) > 20
    # One that stood behind a last page is computed again, once there is another.
    assert life.steps.moved <= made - in_rounds + sequences


def test_a_draft_model_computes_each_token_once() -> None:
    """Whoever comes and goes: what it has seen in rounds it need not catch up with."""
    life = RoundsLife(3, 60, 40, -1, 0.7, (7,), 4, together=(2, 4), sequences=3, drafted=True)
    for device in life.devices.values():
        device.silence = 0.0
    for chooser in life.choosers.values():
        chooser.stays = 1.0
    for key in range(6):
        life.take(request([7, 8, key], max_tokens=40 + 20 * key))
    to_the_end(life)
    assert life.draft is not None
    made = sum(map(len, life.got))
    assert sum(device.written for device in life.devices.values()) > 2
    assert life.draft.fed < made / 2


def test_switched_fifty_times_while_others_come_and_go() -> None:
    life = life_of(4)
    for turn in range(50):
        life.speculate(turn % 3 != 1)
        if turn % 5 == 2:
            life.take(request([6, len(life.asked)], max_tokens=12 + turn))
        life.step()
    life.speculate(True)
    to_the_end(life)
    assert sum(device.written for device in life.devices.values()) > 3
