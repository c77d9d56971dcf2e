"""Log-probabilities of prompts, and prompts that several sequences share, as the scheduler tells and feeds them."""

from __future__ import annotations

import pytest

from engine.api import FinishReason, Stopping, TokenLogprob
from tests.engine.scheduled import Bench, rows_of

PROMPT = 100


def scores(bench: Bench, key: int) -> list[TokenLogprob]:
    return [one for event in bench.events[key] for one in event.prompt_logprobs]


def whole(count: int) -> list[TokenLogprob]:
    bench = Bench(batch=4096)
    key = bench.admit(PROMPT, text="a", prompt_logprobs=count)
    bench.run()
    return scores(bench, key)


def test_every_token_but_the_first_has_one_before_the_answer() -> None:
    bench = Bench(batch=4096)
    key = bench.admit(PROMPT, text="a", prompt_logprobs=3)
    bench.run()
    assert len(scores(bench, key)) == PROMPT - 1
    assert all(len(one.top) == 3 for one in scores(bench, key))
    assert not any(event.prompt_logprobs for event in bench.events[key][1:])
    assert len(bench.output(key)) == 8


@pytest.mark.parametrize("batch", [1, 2, 16, 17, 99, 100, 101])
def test_in_chunks_they_are_the_same(batch: int) -> None:
    bench = Bench(batch=batch)
    key = bench.admit(PROMPT, text="a", prompt_logprobs=2)
    bench.run()
    assert scores(bench, key) == whole(2)


def test_what_is_kept_of_an_earlier_prompt_hides_no_token() -> None:
    bench = Bench(batch=4096)
    for count in (None, 2, 0):
        bench.admit(PROMPT, text="a", prompt_logprobs=count)
        bench.run()
    assert scores(bench, 1) == []
    assert scores(bench, 2) == whole(2)
    assert scores(bench, 3) == whole(0)
    again = bench.admit(PROMPT, text="a")
    bench.run()
    found = bench.events[again][-1].finish
    assert found is not None
    assert found.cached_tokens == 96  # one that is scored leaves its pages to others


def test_a_preempted_sequence_says_nothing_twice() -> None:
    bench = Bench(pages=10, batch=3)
    first = bench.admit(20, output=100)
    scored = bench.admit(100, text="a", output=10, prompt_logprobs=1)
    bench.run()
    assert bench.scheduler.load.preemptions
    assert scores(bench, scored) == whole(1)
    assert (len(bench.output(first)), len(bench.output(scored))) == (100, 10)


def test_an_answer_of_no_tokens() -> None:
    bench = Bench()
    key = bench.admit(PROMPT, text="a", prompt_logprobs=1, stopping=Stopping(max_tokens=0))
    bench.run()
    assert scores(bench, key) == whole(1)
    assert bench.output(key) == []
    assert bench.reason(key) is FinishReason.LENGTH
    with pytest.raises(ValueError, match="max_tokens"):
        bench.admit(PROMPT, stopping=Stopping(max_tokens=0))


def fed(bench: Bench) -> int:
    """Prompt tokens that were computed."""
    return sum(row.count for plan in bench.plans for row in plan.rows if row.count > 1)


@pytest.mark.parametrize("batch", [40, 4096])
def test_siblings_compute_their_prompt_once(batch: int) -> None:
    bench = Bench(batch=batch)
    for _ in range(4):
        bench.admit(PROMPT, text="a", siblings=4)
    bench.run()
    assert fed(bench) == PROMPT + 3 * (PROMPT % 16)
    outputs = [bench.output(key) for key in bench.sequences]
    assert outputs == [outputs[0]] * 4


def test_siblings_that_may_share_nothing_do_not_wait() -> None:
    bench = Bench(batch=4096, prefix=False)
    for _ in range(4):
        bench.admit(PROMPT, text="a", siblings=4)
    assert len(rows_of(bench.step())) == 4


def test_a_sibling_of_a_scored_one_finds_its_pages() -> None:
    bench = Bench(batch=4096)
    bench.admit(PROMPT, text="a", siblings=2, prompt_logprobs=1)
    bench.admit(PROMPT, text="a", siblings=2)
    bench.run()
    assert fed(bench) == PROMPT + PROMPT % 16
