"""Converts a live sequence to rows of plans."""

from __future__ import annotations

from engine.scheduling.plan import Admitted, Row
from engine.scheduling.sequence import Sequence


def admission_of(sequence: Sequence) -> Admitted:
    request = sequence.request
    return Admitted(
        key=sequence.key,
        slot=sequence.slot,
        token_ids=tuple(sequence.token_ids),
        prompt_length=sequence.prompt_length,
        sampling=request.sampling,
        stopping=request.stopping,
        logprobs=request.logprobs,
        draft_limit=request.draft_limit,
        constraint=request.constraint,
        prompt_logprobs=request.prompt_logprobs,
    )


def row_of(sequence: Sequence, start: int, count: int, sample: bool) -> Row:
    """Names only the pages that no plan has named since the sequence got its slot."""
    first, pages = sequence.planned_pages, sequence.pages
    score = sequence.request.prompt_logprobs is not None and sequence.scores(start + count)
    if first == len(pages):
        return Row(sequence.key, sequence.slot, start, count, sample, score=score)
    sequence.planned_pages = len(pages)
    return Row(sequence.key, sequence.slot, start, count, sample, first, tuple(pages[first:]), score=score)
