"""Speculation over every kind of proposer and format of weights: the answers are those of no speculation, for every
field of sampling, whatever is proposed, and at every border."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from msgspec import structs

from bench.speculation import Forced
from engine.api import GenerationRequest
from engine.execution.registry import EXECUTORS
from engine.execution.runner import ModelRunner
from engine.execution.speculation.costs import SIZES
from engine.execution.speculation.draft_model import DraftModel
from engine.execution.speculation.eager_executor import Speculation
from engine.execution.speculation.proposer import PromptLookup, Proposer
from engine.kv.kv_cache import KvCache
from engine.model.transformer import StepInput
from engine.sampling.sampler import Sampler
from engine.scheduling.plan import Assignment, StepPlan, StepResult
from engine.settings import EngineSettings
from engine.worker.build import PreparedModel, make_runner, prepare
from engine.worker.offers import PLAIN_TRIAL
from tests.contract.answers import FREE, Answer, generate, progress, requests

EAGER = EXECUTORS[-1]
ENTRY = EXECUTORS[-2]
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"quantization": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "int4": {},
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
CONFIGS: dict[str, dict[str, Any]] = {"int4": {"quantization_config": AWQ}}
CASES = [
    *(("plain", name) for name in ("lookup", "draft", "both", "prophet", "half", "wrong")),
    *((form, name) for form in ("int8", "bfloat16", "int4") for name in ("both", "half")),
]


class Tally:
    """A `Runner` in front of another, and how many draft tokens it verified."""

    def __init__(self, inner: ModelRunner) -> None:
        self._inner = inner
        self.info, self.pages, self.close = inner.info, inner.pages, inner.close
        self.set_optimization = inner.set_optimization
        self.proposed = self.accepted = 0

    def run(self, plan: StepPlan, assignment: Assignment | None = None) -> StepResult:
        result = self._inner.run(plan)
        self.proposed += sum(row.draft_proposed for row in result.rows.values())
        self.accepted += sum(row.draft_accepted for row in result.rows.values())
        return result


def speculating(settings: EngineSettings, prepared: PreparedModel, *proposers: Proposer) -> ModelRunner:
    """With these proposers, and whatever they say verified."""
    made = replace(ENTRY, make=lambda parts: Speculation(parts, proposers, FREE))
    return make_runner(settings, prepared, progress, (made, EAGER))


@pytest.fixture(scope="module")
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[EngineSettings, PreparedModel]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({**PLAIN_TRIAL, **CONFIGS.get(request.param, {})}))
    settings = EngineSettings(
        model=str(folder),
        load_format="dummy",
        device="cpu",
        max_sequences=16,
        kv_bytes=16 << 20,
        **{"dtype": "float32", **FORMATS[request.param]},
    )
    return settings, prepare(settings, progress)


def right(model: tuple[EngineSettings, PreparedModel], asked: list[GenerationRequest]) -> dict[str, Answer]:
    """Without speculation."""
    return generate(make_runner(*model, progress, (EAGER,)), asked, 256, 512)


def by_prompt(asked: list[GenerationRequest], answers: dict[str, Answer]) -> dict[tuple[int, ...], list[int]]:
    return {one.token_ids: answers[one.request_id].ids for one in asked}


def draft_of(prepared: PreparedModel) -> DraftModel:
    """The target as its own draft: with its own pages, it should guess all that it says."""
    parts = prepared.parts
    placement = parts.model.placement
    pool = KvCache(parts.pool.shape, parts.pool.pages, placement.activations, heads_outside=True)
    sampler = Sampler(parts.model.config.vocab_size, parts.max_sequences, placement.device, parts.constraints)
    return DraftModel(parts.model, pool, sampler)


def proposers(name: str, prepared: PreparedModel, told: dict[tuple[int, ...], list[int]]) -> tuple[Proposer, ...]:
    kinds: dict[str, tuple[Proposer, ...]] = {
        "lookup": (PromptLookup(),),
        "draft": (draft_of(prepared),),
        "both": (PromptLookup(), draft_of(prepared)),
        "prophet": (Forced(told, 1.0),),
        "half": (Forced(told, 0.5),),
        "wrong": (Forced(told, 0.0),),
    }
    return kinds[name]


@pytest.mark.parametrize("model", ["plain"], indirect=True)
def test_a_draft_is_timed_as_it_will_be_made(
    model: tuple[EngineSettings, PreparedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first step behind one of the target's, with the two tokens that a right draft leaves to be fed."""
    draft, done = draft_of(model[1]), [0]
    forward = draft.model.forward

    def noted(step: StepInput, pool: KvCache) -> torch.Tensor:
        done.append(len(step.token_ids))
        return forward(step, pool)

    monkeypatch.setattr(draft.model, "forward", noted)
    with torch.inference_mode():
        draft.measure(lambda: done.append(0))
    behind = [tokens for before, tokens in pairwise(done) if before == 0]
    further = done[len(done) - done[::-1].index(0) + 1 :]
    assert {2} <= set(behind) <= {2 * size for size in SIZES}  # of those that there is time for
    assert {1} <= set(further) <= set(SIZES)
    assert 0 == draft.seconds(1, 0) < draft.seconds(1, 1) < draft.seconds(1, 2) < draft.seconds(1, 7)


@pytest.mark.product
@pytest.mark.parametrize(("model", "name"), CASES, indirect=["model"])
def test_answers_are_those_without(model: tuple[EngineSettings, PreparedModel], name: str) -> None:
    """Greedy and sampled, with penalties, biases, filters, stop tokens that are barred at first, and log-probabilities,
    together, in chunks, short of pages, and one after the other."""
    asked = requests(8)
    asked[1::3] = [structs.replace(one, logprobs=3) for one in asked[1::3]]
    expected = right(model, asked)
    runner = speculating(*model, *proposers(name, model[1], by_prompt(asked, expected)))
    counted = Tally(runner)
    for batch, pages, budget, apart in (
        (asked, 256, 512, 0),
        (asked[::-1], 256, 7, 3),
        (asked, 24, 32, 0),
    ):
        found = generate(counted, batch, pages, budget, apart)
        for one in batch:
            assert found[one.request_id].ids == expected[one.request_id].ids
            for ours, theirs in zip(found[one.request_id].logprobs, expected[one.request_id].logprobs, strict=True):
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
    assert counted.proposed > 0
    if name in ("draft", "prophet"):
        assert counted.accepted > 0.9 * counted.proposed
    if name == "wrong":
        assert counted.accepted == 0
