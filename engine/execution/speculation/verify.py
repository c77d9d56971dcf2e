"""Which of a draft's tokens count: those that the model chooses itself, and the one it chooses instead of the first
that it does not, or behind the last."""

from __future__ import annotations

from collections.abc import Sequence as Items

from engine.api import TokenLogprob
from engine.execution.speculation.proposer import MOST_DRAFTED, Draft
from engine.scheduling.plan import RowResult
from engine.scheduling.sequence_state import SequenceState
from engine.settings import PAGE_SIZE


def most_draftable(sequence: SequenceState, max_context: int) -> int:
    """How long a draft may be for all it can bring to have a page, and a use."""
    length = len(sequence.token_ids)
    return min(
        MOST_DRAFTED if sequence.draft_limit is None else sequence.draft_limit,
        MOST_DRAFTED,
        sequence.stopping.max_tokens - sequence.output_length - 1,
        max_context - length - 1,
        len(sequence.pages) * PAGE_SIZE - length,
    )


def accept(sequence: SequenceState, draft: Draft, chosen: Items[RowResult]) -> RowResult:
    """`chosen` is what follows the sequence, the sequence and the draft's first token, and so on. Behind a token that
    ends the sequence, and where there is none, nothing counts."""
    if not draft or not chosen[0].token_ids:
        return chosen[0]
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    accepted = 0
    stopping = sequence.stopping
    for at, one in enumerate(chosen):
        if not one.token_ids:
            break
        token_id = one.token_ids[0]
        ids.append(token_id)
        logprobs += one.logprobs
        if at == len(draft) or token_id != draft[at]:
            break
        accepted += 1
        if token_id in stopping.stop_token_ids and sequence.output_length + at >= stopping.min_tokens:
            break
    return RowResult(tuple(ids), tuple(logprobs), len(draft), accepted)
