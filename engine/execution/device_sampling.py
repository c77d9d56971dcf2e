"""Decides which rows need the sampling stages after the head, and describes these rows to them."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from engine.kernels.sampling import SampledRow, Sampling
from engine.sampling.noise import seed_key
from engine.scheduling.sequence_state import SequenceState


def beyond_temperature(sequence: SequenceState) -> bool:
    """Returns whether a sequence has penalties, filters or biases; `min_tokens` does not count."""
    one = sequence.sampling
    return bool(_penalised(sequence) or _filtered(sequence) or one.logit_bias)


def sampled_row(sequence: SequenceState, unreported: int = 0) -> SampledRow | None:
    """Returns None where the head suffices `unreported` tokens later: for greedy choice, or a temperature alone."""
    one, stopping = sequence.sampling, sequence.stopping
    barred = stopping.min_tokens > sequence.output_length + unreported and bool(stopping.stop_token_ids)
    penalised = _penalised(sequence)
    if not (barred or penalised or _filtered(sequence) or one.logit_bias):
        return None
    return SampledRow(
        temperature=one.temperature,
        top_k=one.top_k,
        top_p=one.top_p,
        min_p=one.min_p,
        repetition=one.repetition_penalty,
        presence=one.presence_penalty,
        frequency=one.frequency_penalty,
        free_from=sequence.prompt_length + stopping.min_tokens,
        noise_key=seed_key(one.seed),
        biased=bool(one.logit_bias),
        marked=penalised or barred,
    )


def needed(sequence: SequenceState, unreported: int = 0) -> bool:
    return sampled_row(sequence, unreported) is not None


def place(state: Sampling, at: int, sequence: SequenceState, unreported: Tokens[int] = ()) -> None:
    row = sampled_row(sequence, len(unreported))
    if row is None:
        state.leave(at, sequence.sampling.temperature)
        return
    if row.biased:
        state.set_bias(at, sequence.sampling.logit_bias)
    if row.marked:
        prompt = sequence.token_ids[: sequence.prompt_length]
        output = [*sequence.token_ids[sequence.prompt_length :], *unreported]
        state.set_marks(at, prompt, output, sequence.stopping.stop_token_ids)
    state.place(at, row)


def _penalised(sequence: SequenceState) -> bool:
    one = sequence.sampling
    return (one.repetition_penalty, one.presence_penalty, one.frequency_penalty) != (1.0, 0.0, 0.0)


def _filtered(sequence: SequenceState) -> bool:
    one = sequence.sampling
    return one.temperature > 0 and (one.top_k > 0 or one.top_p < 1 or one.min_p > 0)
