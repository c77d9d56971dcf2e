"""Constrained answers of a real model, eager on the CPU: what a grammar allows, what it forces, how it ends."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from msgspec.structs import replace

from bench.constrained import EOS, Answering, asked, demo, grammar, schemas, tokenizer
from engine.api import Constraint, FinishReason
from engine.ipc.events import Failure
from engine.scheduling.plan import Runner

pytestmark = pytest.mark.product

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "colour of the house": {"enum": ["dark red", "green"]},
            "years": {"type": "integer", "minimum": 3, "maximum": 17},
        },
        "required": ["name", "colour of the house", "years"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return demo()


@pytest.mark.proof
def test_finished_answers_are_valid_at_temperature_one(runner: Runner) -> None:
    made = schemas(40)
    told = Answering(runner).answer(
        [asked(grammar("json_schema", json.dumps(one)), seed=n) for n, one in enumerate(made)]
    )
    finished = 0
    for schema, one in zip(made, told, strict=True):
        assert one.failure is None
        assert one.finish is not None
        if one.finish.reason is FinishReason.STOP:
            finished += 1
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(one.text))
    assert finished >= 24  # others may go on and on within their grammar


def test_forced_tokens_take_no_step(runner: Runner) -> None:
    """Where log-probabilities are asked for each token has its step."""
    form = grammar("json_schema", PERSON)
    quick, slow = Answering(runner).answer([asked(form), asked(form, logprobs=1)])
    assert json.loads(quick.text).keys() == json.loads(slow.text).keys()
    assert quick.finish is not None
    assert quick.finish.reason is FinishReason.STOP
    assert slow.steps >= len(slow.ids) == len(slow.logprobs)
    assert quick.steps < slow.steps * 0.75


def test_batch_mates_say_what_they_say_alone(runner: Runner) -> None:
    plain, form = asked(None, seed=5, tokens=30), asked(grammar("json_schema", PERSON), seed=6)
    alone = [Answering(runner).answer([one])[0].ids for one in (plain, form)]
    assert [one.ids for one in Answering(runner).answer([plain, form])] == alone


@pytest.mark.product
def test_a_preempted_answer_goes_on_in_its_grammar(runner: Runner) -> None:
    """Two sequences that do not fit together: the one that yields takes its grammar up where it was."""
    form = grammar("json_schema", json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 60}))
    requests = [asked(form, seed=seed, tokens=180) for seed in (1, 2)]
    roomy, narrow = Answering(runner), Answering(runner, pages=16)
    expected = [one.ids for one in roomy.answer(requests)]
    assert [one.ids for one in narrow.answer(requests)] == expected
    assert narrow.scheduler.load.preemptions > 0 == roomy.scheduler.load.preemptions


@pytest.mark.parametrize("stops", [EOS, ()])
def test_an_answer_ends_where_nothing_may_follow_without_a_stop_token_and_before_min_tokens(
    runner: Runner, stops: tuple[int, ...]
) -> None:
    request = asked(grammar("choice", "yes", "no"))
    request = replace(request, stopping=replace(request.stopping, min_tokens=50, stop_token_ids=stops))
    (told,) = Answering(runner).answer([request])
    assert told.text in ("yes", "no")
    assert told.finish is not None
    assert (told.finish.reason, told.finish.stop_token_id) == (FinishReason.STOP, None)


def test_a_stop_token_is_drawn_only_where_the_grammar_may_end(runner: Runner) -> None:
    """Even one that the caller made a stop, and the bias calls for."""
    comma = tokenizer().token_to_id(",")
    request = asked(grammar("regex", "[a-z]{3},[a-z]{3}(,[a-z]{3})*"), seed=3)
    sampling = replace(request.sampling, logit_bias=((EOS[0], 100.0),))
    request = replace(request, sampling=sampling)
    (told,) = Answering(runner).answer([request])
    assert told.finish is not None
    assert told.finish.stop_token_id == EOS[0]
    assert re.fullmatch("[a-z]{3},[a-z]{3}", told.text)
    request = replace(request, stopping=replace(request.stopping, stop_token_ids=(comma,)))
    (told,) = Answering(runner).answer([request])
    assert told.failure is Failure.CONSTRAINT


def test_log_probabilities_are_those_of_the_model_alone(runner: Runner) -> None:
    """The first token that the grammar allows is not the model's own, which stands at the top."""
    form = asked(grammar("choice", "~~~"), logprobs=1)
    (told,) = Answering(runner).answer([form])
    assert told.text == "~~~"
    assert all(one.top[0][1] >= one.logprob for one in told.logprobs)
    assert told.logprobs[0].logprob < -1


@pytest.mark.parametrize("text", ["not a grammar at all {", '{"grammars": []}'])
def test_what_cannot_be_compiled_ends_its_own_request_alone(runner: Runner, text: str) -> None:
    broken, sound = asked(Constraint(text)), asked(grammar("regex", "[0-9]{3}"))
    told = Answering(runner).answer([broken, sound])
    assert told[0].failure is Failure.CONSTRAINT
    assert told[1].finish is not None
    assert told[1].text.isdecimal()


def test_a_token_of_the_model_with_no_text_is_never_allowed(runner: Runner) -> None:
    request = asked(grammar("regex", ".{1,8}"), seed=4)
    sampling = replace(request.sampling, logit_bias=((1, 100.0),))  # <|im_start|>
    (told,) = Answering(runner).answer([replace(request, sampling=sampling)])
    assert told.finish is not None
    assert 1 not in told.ids
    assert 1 <= len(told.text) <= 8


@pytest.mark.parametrize("top_k", [1, 4, 300])
def test_filters_choose_among_what_is_allowed(runner: Runner, top_k: int) -> None:
    request = asked(grammar("regex", "(a|b){40}"), seed=8)
    (told,) = Answering(runner).answer([replace(request, sampling=replace(request.sampling, top_k=top_k, top_p=0.9))])
    assert re.fullmatch("[ab]{40}", told.text)
