"""What callers and operators learn of guessed tokens, and what a request may ask for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.conftest import Server, ask, ask_stream
from tests.service.scraped import told

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]


@pytest.fixture(scope="module")
def four(serve: Serve) -> Iterator[Server]:
    """Each step but the last brings four ids, of which three were guessed."""
    with serve("--engine=fake", "--fake.tokens-per-step=4") as server:
        yield server


def drafts(usage: pb.Usage) -> tuple[int, int]:
    return usage.draft_proposed, usage.draft_accepted


def test_usage_counts_what_was_guessed(four: Server) -> None:
    """Nothing of an answer depends on it."""
    plain = four.generation.Generate(ask("x", 40), timeout=60)
    assert drafts(plain.finish.usage)[0] == drafts(plain.finish.usage)[1] == 30
    streamed = list(four.generation.GenerateStream(ask_stream("x", 40), timeout=60))
    assert drafts(streamed[-1].finish.usage) == drafts(plain.finish.usage)
    for options, guessed in (
        (pb.SpeculationOptions(disable=True), 0),
        (pb.SpeculationOptions(disable=True, max_draft_tokens=3), 0),
        (pb.SpeculationOptions(max_draft_tokens=0), 0),
        (pb.SpeculationOptions(max_draft_tokens=1), 20),
        (pb.SpeculationOptions(max_draft_tokens=100), 30),
        (pb.SpeculationOptions(disable=False), 30),
    ):
        answer = four.generation.Generate(ask("x", 40, speculation=options), timeout=60)
        assert drafts(answer.finish.usage) == (guessed, guessed)
        assert answer.text == plain.text


def test_a_stop_string_within_accepted_ids(four: Server) -> None:
    """Wherever in a step's four ids it ends; nothing behind it is told, or counted as output."""
    text = four.generation.Generate(ask("x", 40), timeout=60).text
    for at in range(2, 26):
        stop = text[at : at + 3]
        asked = ask("x", stopping=pb.StoppingOptions(max_tokens=40, stop_strings=[stop]))
        answer = four.generation.Generate(asked, timeout=60)
        assert answer.text == text[: text.index(stop)]
        assert answer.finish.reason == pb.FINISH_REASON_STOP_STRING
        again = pb.GenerateStreamRequest.FromString(asked.SerializeToString())
        streamed = list(four.generation.GenerateStream(again, timeout=60))
        assert "".join(one.text for one in streamed) == answer.text
        assert len(text[: text.index(stop)]) < answer.finish.usage.completion_tokens <= text.index(stop) + len(stop)
        assert streamed[-1].finish.usage.completion_tokens == answer.finish.usage.completion_tokens


def test_operators_see_it(four: Server) -> None:
    # Behind this one, all of what was cut short before has been counted.
    four.generation.Generate(ask("x", 1, speculation=pb.SpeculationOptions(disable=True)), timeout=60)
    before = four.idle().draft_proposed
    four.generation.Generate(ask("y", 40), timeout=60)
    load = four.until(lambda load: load.draft_proposed >= before + 30)
    assert load.draft_accepted == load.draft_proposed == before + 30
    proposed, accepted = (told(four, f"draft_{name}_tokens_total", before + 30) for name in ("proposed", "accepted"))
    assert proposed == accepted == before + 30
    four.until(lambda _: "draft_proposed=30 draft_accepted=30" in four.log.read_text())
