"""Whether tokens are what eager's logits and a request's parameters allow, to within what rounding may change."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

import pytest
import torch

from engine.api import GenerationRequest, TokenLogprob
from engine.execution import device_sampling as sampled
from engine.execution.eager import Eager
from engine.execution.step_state import Parts
from engine.kernels import reference
from engine.kernels.sampling import SampledRow, allocate
from engine.sampling.noise import seed_key
from engine.scheduling.sequence import Sequence
from tests.engine.stepped import known, put

NEVER = -1e4  # a logit that no noise makes the best


def moved(row: SampledRow, by: int) -> SampledRow:
    """The filters a little wider (1) or narrower (-1): a token at their border may be in or out by rounding."""
    top_p = min(row.top_p + by * 0.02, 1.0) if row.top_p < 1 else 1.0
    return replace(row, top_k=row.top_k + by * (row.top_k // 4), top_p=top_p, min_p=row.min_p * (1 - by * 0.2))


def judge(
    parts: Parts,
    request: GenerationRequest,
    ids: Items[int],
    gap: float,
    logprobs: Items[TokenLogprob] = (),
    within: Callable[[int], torch.Tensor] | None = None,
) -> None:
    """Each token is among what eager's logits leave, and the best of it but for `gap` logits, given those before it.
    `within`: bool [vocabulary], what may follow so many tokens. Overwrites the first pages."""
    eager, device = Eager(parts), parts.model.placement.device
    state = allocate(1, parts.model.config.vocab_size, device)
    for at, token in enumerate(ids):
        before = [*request.token_ids, *ids[:at]]
        one = Sequence(request, before, slot=0, pages=list(range(1 + len(before) // 16)))
        sequence = put(parts.sequences, one)
        start = 0 if at == 0 else len(before) - 1
        with torch.inference_mode():
            logits = eager.logits([known(one, start, len(before) - start)])
        assert logits is not None
        left = logits if within is None else logits.masked_fill(~within(at).to(device), NEVER)
        row = sampled.sampled_row(sequence)
        if row is None:
            row = SampledRow(temperature=request.sampling.temperature, noise_key=seed_key(request.sampling.seed))
        else:
            sampled.place(state, 0, sequence)
        best, loose = (
            reference.scores(left[0], how, len(before), state.bias[0], state.marks[0])
            for how in (moved(row, -1), moved(row, 1))
        )
        assert best is not None
        assert loose is not None
        behind = float(best.max() - loose[token]) * (row.heat or 1.0)
        assert behind < gap, (request.request_id, at, token, behind)
        if logprobs:
            same = logits[0].log_softmax(-1)
            for other, value in ((token, logprobs[at].logprob), *logprobs[at].top):
                assert value == pytest.approx(float(same[other]), abs=gap)
