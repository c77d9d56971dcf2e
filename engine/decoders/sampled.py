"""Which rows need more than the head's own draw, and what the sampling stages must be told of them."""

from __future__ import annotations

from engine.api import GenerationRequest
from engine.kernels.sampling import SampledRow, Sampling
from engine.noise import seed_key
from engine.sequence import Sequence


def sampled_row(request: GenerationRequest) -> SampledRow | None:
    """The parameters of a request that the head cannot serve; None where it can: greedy, or temperature alone."""
    one, stopping = request.sampling, request.stopping
    barred = stopping.min_tokens > 0 and bool(stopping.stop_token_ids)
    penalised = (one.repetition_penalty, one.presence_penalty, one.frequency_penalty) != (1.0, 0.0, 0.0)
    filtered = one.temperature > 0 and (one.top_k > 0 or one.top_p < 1 or one.min_p > 0)
    if not (barred or penalised or filtered or one.logit_bias):
        return None
    return SampledRow(
        temperature=one.temperature,
        top_k=one.top_k,
        top_p=one.top_p,
        min_p=one.min_p,
        repetition=one.repetition_penalty,
        presence=one.presence_penalty,
        frequency=one.frequency_penalty,
        free_from=len(request.token_ids) + stopping.min_tokens,
        noise_key=seed_key(one.seed),
        biased=bool(one.logit_bias),
        marked=penalised or barred,
    )


def place(state: Sampling, at: int, sequence: Sequence) -> bool:
    """Puts a sequence into a row, with what it has generated so far; whether the row needs the sampling stages."""
    request = sequence.request
    row = sampled_row(request)
    if row is None:
        state.leave(at)
        return False
    if row.biased:
        state.set_bias(at, request.sampling.logit_bias)
    if row.marked:
        prompt, output = sequence.token_ids[: sequence.prompt_length], sequence.token_ids[sequence.prompt_length :]
        state.set_marks(at, prompt, output, request.stopping.stop_token_ids)
    state.place(at, row)
    return True
