"""Applies new ids to their sequence: how many of them count, and whether they end it."""

from __future__ import annotations

from engine.api import Finish, FinishReason, Start, TokenLogprob
from engine.ipc.events import Event, Failure
from engine.scheduling.plan import Row, RowEnd, RowResult
from engine.scheduling.sequence import Sequence

_FAILURES = {None: Failure.STEP, RowEnd.STUCK: Failure.CONSTRAINT, RowEnd.COSTLY: Failure.CONSTRAINT_COST}


def scored_tokens(sequence: Sequence, row: Row, brought: RowResult) -> tuple[TokenLogprob, ...]:
    """Leaves out what the reader got before a preemption."""
    fresh = brought.prompt_logprobs[sequence.scored - row.start :]
    sequence.scored += len(fresh)
    return fresh


def take(sequence: Sequence, row: Row, brought: RowResult, max_context: int, now: float) -> Event:
    """Adds a row's ids, up to the sequence's end."""
    ids, end = brought.token_ids, brought.end
    scores = scored_tokens(sequence, row, brought) if row.score else ()
    if not ids:
        return _without_token(sequence, row, end, scores, now)
    kept, reason = _ending(sequence, ids, max_context)
    if end is RowEnd.COMPLETE and kept == len(ids):
        reason = FinishReason.STOP
    if kept < len(ids):
        ids = ids[:kept]
    sequence.token_ids += ids
    sequence.advance(row.start + row.count + min(kept, len(brought.token_ids) - brought.forced) - 1)
    sequence.last_token_at = now
    begun = None
    if sequence.first_token_at is None:
        sequence.first_token_at = now
        begun = _start(sequence, now)
    logprobs = brought.logprobs[:kept]
    proposed, accepted = brought.draft_proposed, min(brought.draft_accepted, kept)
    if reason is None:
        return Event(sequence.key, ids, logprobs, None, None, begun, proposed, accepted, scores)
    stop = ids[-1] if reason is FinishReason.STOP and end is not RowEnd.COMPLETE else None
    ended = finish(sequence, reason, now, stop)
    return Event(sequence.key, ids, logprobs, ended, None, begun, proposed, accepted, scores)


def _without_token(
    sequence: Sequence, row: Row, end: RowEnd | None, scores: tuple[TokenLogprob, ...], now: float
) -> Event:
    if end is RowEnd.LATE:
        sequence.advance(row.start + row.count - 1)  # its last token is fed again
        return Event(sequence.key, prompt_logprobs=scores)
    if end is RowEnd.COMPLETE:
        return Event(sequence.key, finish=finish(sequence, FinishReason.STOP, now), prompt_logprobs=scores)
    return Event(sequence.key, failure=_FAILURES[end])


def _start(sequence: Sequence, now: float) -> Start:
    planned = now if sequence.first_planned_at is None else sequence.first_planned_at
    return Start(
        cached_tokens=sequence.cached_tokens, queue=planned - sequence.request.arrived_at, prefill=now - planned
    )


def _ending(sequence: Sequence, ids: tuple[int, ...], max_context: int) -> tuple[int, FinishReason | None]:
    """How many ids count, and the reason where the last of them ends the sequence."""
    stopping = sequence.request.stopping
    if not stopping.max_tokens:
        return 0, FinishReason.LENGTH
    length = len(sequence.token_ids)
    output = length - len(sequence.request.token_ids)
    room = min(stopping.max_tokens - output, max_context - length)
    for index, token_id in enumerate(ids):
        if token_id in stopping.stop_token_ids and output + index >= stopping.min_tokens:
            return index + 1, FinishReason.STOP
        if index + 1 == room:
            return room, FinishReason.LENGTH
    return len(ids), None


def finish(sequence: Sequence, reason: FinishReason, now: float, stop_token_id: int | None = None) -> Finish:
    planned = now if sequence.first_planned_at is None else sequence.first_planned_at
    first = now if sequence.first_token_at is None else sequence.first_token_at
    last = first if sequence.last_token_at is None else sequence.last_token_at
    return Finish(
        reason=reason,
        stop_token_id=stop_token_id,
        cached_tokens=sequence.cached_tokens,
        queue=planned - sequence.request.arrived_at,
        prefill=first - planned,
        decode=last - first,
    )
