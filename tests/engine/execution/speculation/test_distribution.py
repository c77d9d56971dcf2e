"""With a draft, right or adversarially wrong, tokens have the target's distribution: two in a row, against the joint
probabilities computed from the definition, for each kind of sampling."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from engine.api import GREEDY, SamplingParams, Stopping
from engine.execution.speculation.eager_executor import accept
from engine.sampling.sampler import Sampler
from engine.scheduling.sequence_state import SequenceState

pytestmark = pytest.mark.proof

PAIRS, VOCABULARY = 50_000, 6  # 10⁵ draws for each kind
DRAWN = replace(GREEDY, temperature=1.0)
SETTINGS = {
    "cold": replace(DRAWN, temperature=0.2),
    "flat": replace(DRAWN, temperature=5.0),
    "top_k": replace(DRAWN, top_k=3),
    "top_p": replace(DRAWN, top_p=0.7),
    "min_p": replace(DRAWN, min_p=0.2),
    "penalised": replace(DRAWN, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.7),
    "biased": replace(DRAWN, logit_bias=((1, 2.0), (4, -3.0))),
}
LOGITS = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 1.5  # by the token before
FIRST = 2  # the prompt


def probabilities(how: SamplingParams, before: list[int]) -> torch.Tensor:
    """Of the next token, behind the prompt and these."""
    logits = LOGITS[(FIRST, *before)[-1]].double().clone()
    for token_id, value in how.logit_bias:
        logits[token_id] += value
    for token_id in {FIRST, *before}:
        penalty = how.repetition_penalty
        logits[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty
    for token_id in set(before):
        logits[token_id] -= how.presence_penalty + how.frequency_penalty * before.count(token_id)
    found = (logits / how.temperature).softmax(-1)
    order = found.argsort(descending=True)
    if how.top_k:
        found[order[how.top_k :]] = 0
    if how.top_p < 1:
        share = found[order].cumsum(0) - found[order]
        found[order[share >= how.top_p * found.sum()]] = 0
    found[found < how.min_p * found.max()] = 0
    return found / found.sum()


def drawn(how: SamplingParams) -> tuple[torch.Tensor, int, int]:
    """How often each pair came, and how many drafts were accepted of those that were likely, and unlikely."""
    one = Stopping(max_tokens=9)
    sequences = [SequenceState(at, at, [FIRST], 1, replace(how, seed=at), one, None) for at in range(PAIRS)]
    sampler = Sampler(VOCABULARY, PAIRS, torch.device("cpu"))
    likely, unlikely = int(probabilities(how, []).argmax()), int(LOGITS[FIRST].argmin())
    drafts = [likely if at % 2 else unlikely for at in range(PAIRS)]
    before = torch.tensor([token for draft in drafts for token in (FIRST, draft)])
    twice = [sequence for sequence in sequences for _ in range(2)]
    assumed = [tokens for draft in drafts for tokens in ((), (draft,))]
    chosen = sampler.sample(twice, LOGITS[before], assumed)
    accepted, late = [0, 0], []
    for at, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
        result = accept(sequence, (draft,), chosen[2 * at : 2 * at + 2])
        accepted[at % 2] += result.draft_accepted
        sequence.token_ids += result.token_ids
        if len(result.token_ids) == 1:
            late.append(sequence)
    last = torch.tensor([sequence.token_ids[-1] for sequence in late])
    for sequence, token_id in zip(late, sampler.choose(late, LOGITS[last]), strict=True):
        sequence.token_ids.append(token_id)
    pairs = torch.tensor([sequence.token_ids[1] * VOCABULARY + sequence.token_ids[2] for sequence in sequences])
    return torch.bincount(pairs, minlength=VOCABULARY**2).double(), accepted[1], accepted[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_keep_the_distribution(name: str) -> None:
    """Seeds are fixed, and so is the outcome."""
    how = SETTINGS[name]
    first = probabilities(how, [])
    expected = torch.cat([first[token] * probabilities(how, [token]) for token in range(VOCABULARY)]) * PAIRS
    found, likely, unlikely = drawn(how)
    assert found.sum() == PAIRS
    assert found[expected == 0].sum() == 0, "a token that a filter bars"
    common = expected >= 5
    rest = torch.stack([found[~common].sum(), expected[~common].sum()])
    observed, wanted = torch.cat([found[common], rest[:1]]), torch.cat([expected[common], rest[1:]])
    statistic = float(((observed - wanted) ** 2 / wanted.clamp(min=1.0)).sum())
    freedom = len(observed) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5
    assert likely / (PAIRS / 2) == pytest.approx(float(first.max()), abs=0.02), "as often as rejection would accept it"
    assert unlikely / (PAIRS / 2) == pytest.approx(float(first[LOGITS[FIRST].argmin()]), abs=0.02)
