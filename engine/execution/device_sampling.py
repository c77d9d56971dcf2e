"""Which rows need more than the head's own draw, and what the sampling stages must be told of them."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from engine.api import GenerationRequest
from engine.kernels.sampling import SampledRow, Sampling
from engine.sampling.noise import seed_key
from engine.scheduling.sequence import Sequence


def sampled_row(request: GenerationRequest, made: int = 0) -> SampledRow | None:
    """What the head cannot serve, of a request that has made so many tokens; None where it can: greedy, or temperature
    alone."""
    one, stopping = request.sampling, request.stopping
    barred = stopping.min_tokens > made and bool(stopping.stop_token_ids)
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


def needed(sequence: Sequence, fresh: int = 0) -> bool:
    """Whether a sequence needs the sampling stages, so many tokens after its last."""
    return sampled_row(sequence.request, sequence.output_length + fresh) is not None


def place(state: Sampling, at: int, sequence: Sequence, fresh: Tokens[int] = ()) -> None:
    """Puts a sequence into a row, with what it has generated so far and `fresh` after that."""
    request = sequence.request
    row = sampled_row(request, sequence.output_length + len(fresh))
    if row is None:
        state.leave(at, request.sampling.temperature)
        return
    if row.biased:
        state.set_bias(at, request.sampling.logit_bias)
    if row.marked:
        output = [*sequence.token_ids[sequence.prompt_length :], *fresh]
        state.set_marks(at, request.token_ids, output, request.stopping.stop_token_ids)
    state.place(at, row)
