"""Computes steps with drafts by eager's pass. The noise of a choice depends on seed and position alone, so the answer
is the same, token by token, whatever was proposed (docs/speculation.md)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from types import MappingProxyType

import torch

from engine.api import TokenLogprob
from engine.execution.eager import Eager, in_order
from engine.execution.router import NO_DRAFTS, Capacity, Drafts, StepOptions, StepRows
from engine.execution.speculation import costs
from engine.execution.speculation.control import Candidate, Control
from engine.execution.speculation.costs import Costs
from engine.execution.speculation.proposer import MOST_DRAFTED, Draft, DraftRequest, PromptLookup, Proposer
from engine.execution.step_state import Parts
from engine.loading.progress import Progress
from engine.scheduling.plan import Row, RowResult, Share
from engine.scheduling.sequence_state import SequenceState
from engine.settings import PAGE_SIZE


def _proposers(parts: Parts) -> tuple[Proposer, ...]:
    return (PromptLookup(),) if parts.draft is None else (PromptLookup(), parts.draft)


Wanted = tuple[tuple[Candidate, int], ...]  # with the tokens to draft


class Speculation:
    """An `Executor` of whole steps in which a draft is expected to pay."""

    lookahead_tokens = MOST_DRAFTED
    max_tokens_per_row = MOST_DRAFTED + 1
    capacity = Capacity()
    switches: Mapping[str, str | None] = MappingProxyType({"speculation": None})

    def __init__(self, parts: Parts, proposers: tuple[Proposer, ...] | None = None, known: Costs | None = None) -> None:
        """`proposers`: best first. `known`: costs to take instead of measured ones."""
        self._parts = parts
        self._eager = Eager(parts)
        self._proposers = _proposers(parts) if proposers is None else proposers
        self.costs = known  # of steps; None until they are measured
        self._control: Control | None = None

    def warmup(self, progress: Progress) -> None:
        if self.costs is None:
            self.costs = self.measured()
        self._control = Control(self.costs)

    def measured(self) -> Costs:
        """Overwrites the first pages, which no sequence may hold."""
        clock = costs.clock_of(self._parts.model.placement.device, alone=self._parts.group is None)
        most = min(self._parts.pool.pages * PAGE_SIZE, self._parts.max_context)
        with torch.inference_mode():
            for proposer in self._proposers:
                proposer.measure(lambda: self._eager.rehearse(1, 0))
            return costs.measure(self._eager.rehearse, most, clock)

    def drafts(self, step: StepRows) -> Drafts:
        wanted = self._decide(step.all)
        if not wanted:
            return NO_DRAFTS
        return Drafts(depths=tuple((one.sequence.key, one.proposer.name, depth) for one, depth in wanted))

    def run(self, share: Share, options: StepOptions) -> dict[int, RowResult]:
        wanted = self._wanted(share)
        drafts = self._propose(wanted)
        for key, draft in drafts.items():
            self._parts.constraints.expect(key, draft)
        ordered = in_order(share.rows)
        fed = self._eager.feed(ordered, options, drafts)
        sampled = [row for row in ordered if row.sample]
        results = self._choose(sampled, drafts, self._parts.model.logits(fed.sampled))
        self._observe(wanted, results)
        return results | self._eager.scored(ordered, fed, results)

    def _wanted(self, share: Share) -> Wanted:
        of = {row.key: self._parts.sequences.of(row) for row in share.rows}
        proposers = {one.name: one for one in self._proposers}
        return tuple((Candidate(of[key], proposers[name], depth), depth) for key, name, depth in share.drafts)

    def _choose(self, rows: list[Row], drafts: Mapping[int, Draft], logits: torch.Tensor) -> dict[int, RowResult]:
        """Returns by row the accepted part of its draft and the token after it. `logits`: [positions, vocab]."""
        of = self._parts.sequences.of
        places = [(of(row), drafts.get(row.key, ())[:at]) for row in rows for at in self._places(row, drafts)]
        chosen = iter(self._parts.sampler.sample([one for one, _ in places], logits, [ids for _, ids in places]))
        results = {}
        for row in rows:
            of_row = [next(chosen) for _ in self._places(row, drafts)]
            results[row.key] = accept(of(row), drafts.get(row.key, ()), of_row)
        return results

    def close(self) -> None: ...

    def _decide(self, rows: tuple[Row, ...]) -> Wanted:
        if self._control is None:
            return ()
        sampled, tokens = sum(row.sample for row in rows), sum(row.count for row in rows)
        wanted = [self._candidates(row) for row in rows if row.count == 1 and row.sample]
        candidates = [self._control.choose(found, sampled, tokens) for found in wanted if found]
        if not candidates:
            return ()
        depths = self._control.depths(candidates, sampled, tokens)
        return tuple((one, depth) for one, depth in zip(candidates, depths, strict=True) if depth)

    def _candidates(self, row: Row) -> list[Candidate]:
        sequence = self._parts.sequences.of(row)
        most = most_draftable(sequence, self._parts.max_context)
        if most < 1:
            return []
        reaches = [(one, min(most, one.reach(sequence))) for one in self._proposers]
        return [Candidate(sequence, proposer, reach) for proposer, reach in reaches if reach > 0]

    @staticmethod
    def _places(row: Row, drafts: Mapping[int, Draft]) -> range:
        return range(1 + len(drafts.get(row.key, ())))

    def _propose(self, wanted: Wanted) -> dict[int, Draft]:
        drafts: dict[int, Draft] = {}
        for proposer in self._proposers:
            asked = [(one, depth) for one, depth in wanted if one.proposer is proposer]
            if asked:
                found = proposer.propose([DraftRequest(one.sequence, depth) for one, depth in asked])
                drafts |= {one.sequence.key: draft for (one, _), draft in zip(asked, found, strict=True)}
        return drafts

    def _observe(self, wanted: Wanted, results: Mapping[int, RowResult]) -> None:
        assert self._control is not None
        for one, _ in wanted:
            result = results[one.sequence.key]
            self._control.observe(one, result.draft_proposed, result.draft_accepted)


def most_draftable(sequence: SequenceState, max_context: int) -> int:
    """Every token of a draft must have a page and a use."""
    length = len(sequence.token_ids)
    return min(
        MOST_DRAFTED if sequence.draft_limit is None else sequence.draft_limit,
        MOST_DRAFTED,
        sequence.stopping.max_tokens - sequence.output_length - 1,
        max_context - length - 1,
        len(sequence.pages) * PAGE_SIZE - length,
    )


def accept(sequence: SequenceState, draft: Draft, chosen: Items[RowResult]) -> RowResult:
    """`chosen[i]` follows the sequence and i tokens of the draft. Nothing counts behind an end or a missing token."""
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
