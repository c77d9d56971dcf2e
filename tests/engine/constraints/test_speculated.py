"""Answers to constraints with drafts in them: the same ids as without, whoever guesses."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from bench.constrained import DEMO, PATIENT, Answering, ConstrainedOutcome, asked, grammar, schemas
from engine.api import FinishReason, GenerationRequest
from engine.constraints.constraints import Constraints
from engine.execution.registry import EXECUTORS
from engine.settings import EngineSettings
from engine.worker.build import PreparedModel, make_runner, prepare
from tests.contract.answers import progress
from tests.contract.test_speculation import Tally, proposers, speculating
from tests.engine.constraints.test_constraints import PERSON

pytestmark = pytest.mark.product

pytestmark = pytest.mark.product

SETTINGS = EngineSettings(model=str(DEMO), device="cpu", dtype="float32", threads=1, max_sequences=8, kv_bytes=64 << 20)


@pytest.fixture(scope="module")
def prepared() -> PreparedModel:
    return prepare(SETTINGS, progress, Constraints(str(DEMO), PATIENT))


def forms() -> list[GenerationRequest]:
    """Each with a prompt of its own: schemas, a choice, and what ends with nothing left to say."""
    made = [grammar("json_schema", json.dumps(one)) for one in schemas(6)]
    made += [grammar("json_schema", PERSON), grammar("regex", "[ab]{40}"), grammar("regex", "(?s).*")]
    made += [grammar("choice", "a long way to go", "a long way home"), grammar("grammar", 'root ::= "x"{30} "."')]
    plain = [asked(form, seed=n, tokens=50) for n, form in enumerate(made)]
    own = [replace(one, token_ids=(5 + n, *one.token_ids[1:])) for n, one in enumerate(plain)]
    own[::4] = [replace(one, logprobs=1) for one in own[::4]]
    own[1::3] = [replace(one, sampling=replace(one.sampling, repetition_penalty=1.2)) for one in own[1::3]]
    return own


@pytest.fixture(scope="module")
def without(prepared: PreparedModel) -> list[ConstrainedOutcome]:
    return Answering(make_runner(SETTINGS, prepared, progress, EXECUTORS[-1:])).answer(forms())


@pytest.mark.parametrize("name", ["both", "prophet", "half"])
def test_answers_are_those_without(prepared: PreparedModel, without: list[ConstrainedOutcome], name: str) -> None:
    requests = forms()
    said = {one.token_ids: answer.ids for one, answer in zip(requests, without, strict=True)}
    counted = Tally(speculating(SETTINGS, prepared, *proposers(name, prepared, said)))
    found = Answering(counted).answer(requests)
    for one, other in zip(found, without, strict=True):
        assert (one.ids, one.failure) == (other.ids, other.failure)
        assert one.finish is not None
        assert other.finish is not None
        assert (one.finish.reason, one.finish.stop_token_id) == (other.finish.reason, other.finish.stop_token_id)
        assert len(one.logprobs) == len(other.logprobs)
    assert any(one.finish is not None and one.finish.reason is FinishReason.STOP for one in found)
    assert counted.proposed > 0
    if name == "prophet":
        assert counted.accepted > 0.9 * counted.proposed
