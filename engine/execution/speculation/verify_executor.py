"""Decodes up to four sequences in captured verifying launches on a GPU, with drafts that never leave it. A draft model
guesses where there is one, else prompt lookup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch

from engine.execution.graphs import decode
from engine.execution.graphs.prefill import DeviceDraft, DraftPrefill
from engine.execution.graphs.verify import VerifyGraphs
from engine.execution.pipeline import GROUPS, Lookahead, Pipeline, verify_lookahead
from engine.execution.router import NO_DRAFTS, Capacity, Drafts, StepOptions, StepRows
from engine.execution.speculation import verifying
from engine.execution.speculation.costs import Costs
from engine.execution.speculation.draft_model import DraftModel
from engine.execution.speculation.estimates import AcceptanceEstimate, DraftEstimate, LookupEstimate, PaidDepths
from engine.execution.speculation.proposer import PromptLookup, Proposer
from engine.execution.step_state import DecodeWeights, Parts, kernel_switches, making
from engine.loading.progress import Progress
from engine.model.layers import few_rows_weights, many_tokens
from engine.scheduling.plan import Row, RowResult, Share

NO_DRAFT = "draft-model names none"
SEVERAL: Final = {2: 4, 4: 2}  # sequences: rows of each. Products keep a row's sums up to eight rows
_TURN = 250e-6  # seconds until the host comes by again, a guess
_PLAIN = 0.9  # of a launch without a draft: a plain step takes no less. What one short kernel takes is timed badly
why_not = decode.why_not


def ask(parts: Parts) -> None:
    behind = _draft_prefill(parts)
    for device in _devices(parts, behind).values():
        device.build()
    if behind is not None:
        behind.ask()


def why_no_draft(parts: Parts) -> str | None:
    if parts.draft is None:
        return NO_DRAFT
    draft = _of_draft(parts, parts.draft)
    return few_rows_weights.why_not(draft) or many_tokens.why_not(draft)


def _of_draft(parts: Parts, draft: DraftModel) -> Parts:
    return replace(parts, model=draft.model, pool=draft.pool, decode=DecodeWeights(), draft=None)


def _draft_prefill(parts: Parts) -> DraftPrefill | None:
    if parts.draft is None or why_no_draft(parts) is not None:
        return None
    return DraftPrefill(_of_draft(parts, parts.draft))


def _draft(parts: Parts, behind: DraftPrefill | None) -> DeviceDraft | None:
    if parts.draft is None or behind is None:
        return None
    read, _ = _of_draft(parts, parts.draft).step_weights
    return DeviceDraft(read, behind.compute, behind.progress.computed)


def _devices(parts: Parts, behind: DraftPrefill | None) -> dict[int, VerifyGraphs]:
    read, _ = parts.step_weights
    draft = _draft(parts, behind)
    alone = VerifyGraphs(parts.kernels, read, parts.max_context, draft=draft)
    found = {1: alone}
    for sequences, group in SEVERAL.items():
        if parts.max_sequences > sequences // 2:
            found[sequences] = VerifyGraphs(
                parts.kernels,
                read,
                parts.max_context,
                draft=draft,
                sequences=sequences,
                groups=(group,),
                beside=alone,
            )
    return found


class CapturedSpeculation:
    """An `Executor` of all rows that decode, where drafts pay."""

    def __init__(self, parts: Parts, known: Costs | None = None) -> None:
        """`known`: costs to take instead of measured ones."""
        self.costs = known  # of launches, their drafts included; None until they are measured
        with making():
            self._behind = _draft_prefill(parts)
            self._devices = _devices(parts, self._behind)
            self._devices[1].build(GROUPS[:1])
        self.switches = {"speculation": None, **kernel_switches(parts.step_weights[1])}
        self._guesser = None if self._behind is None else parts.draft
        self._sequences = parts.sequences
        whole = parts.sequences, parts.max_context
        self.pipelines = {  # by the most sequences of each
            most: Pipeline(parts.led(device), *whole, buckets=(most,), sizes=(1,), settles=False)
            for most, device in self._devices.items()
        }
        self._rows: verifying.VerifyingRows | None = None  # until costs are known
        self._drains_few = False

    def warmup(self, progress: Progress) -> None:
        with torch.inference_mode():
            if self._behind is not None:
                self._behind.warmup(progress)
            for device in self._devices.values():
                device.warmup(progress)
            alone, plain = self._measured()
            several = {
                most: device.seconds(SEVERAL[most], SEVERAL[most] - 1)
                for most, device in self._devices.items()
                if most > 1
            }
        known, self.costs = self.costs, self.costs or Costs(alone)
        # While a host takes a turn, short steps come to little: then plain steps in flight are computed again.
        self._drains_few = plain[1] >= _TURN
        for most, seconds in {1: alone[1], **several}.items():
            self.pipelines[most].lookahead = {most: verify_lookahead(seconds)}
        self._rows = verifying.VerifyingRows(self._ways(known, plain, several), self._sequences)

    def _ways(
        self, known: Costs | None, plain: dict[int, float], several: dict[int, float]
    ) -> dict[int, verifying.Way]:
        """`plain`: seconds of plain steps by rows. `several`: those of launches by sequences."""
        assert self.costs is not None
        lookup = PromptLookup()
        proposer: Proposer = lookup if self._guesser is None else self._guesser
        plain_steps = known or Costs(plain)
        turn = 0.0 if self._drains_few else _TURN
        depths = PaidDepths(self.costs, proposer, None if self._behind is None else self._behind.seconds, turn)
        estimate: AcceptanceEstimate = LookupEstimate(lookup) if self._guesser is None else DraftEstimate(depths)
        # A draft model sees what is fed in its launches, and nothing of launches without a draft. Rows that drain their
        # plain steps lose none by beginning with them.
        stays = verifying.STAYS if self._guesser is None else 0
        beginning = 0 if self._drains_few else min(stays, verifying.BEGINNING)
        ways = {1: verifying.Way(self.pipelines[1], verifying.SinglePolicy(depths, stays, beginning))}
        for most, seconds in several.items():
            paid = seconds if known is None else known.seconds(GROUPS[-1])
            policy = verifying.SeveralPolicy(SEVERAL[most], paid, plain_steps.seconds, estimate, turn)
            ways[most] = verifying.Way(self.pipelines[most], policy, SEVERAL[most])
        return ways

    def _measured(self) -> tuple[dict[int, float], dict[int, float]]:
        """Returns the seconds of one sequence's launch by its rows, and of a plain step of as many sequences. That
        costs no less than the launch without its guesses, which reads fewer pages."""
        device, places = self._devices[1], range(GROUPS[-1])
        if self._guesser is None:  # those of a group cost the same
            groups = {group: device.seconds(group, group - 1) for group in GROUPS}
            found = {1 + depth: groups[verifying.group_of(depth)] for depth in places}
            return found, found
        guessing = {group: device.guessing_seconds(group) for group in GROUPS}
        found = {1 + depth: device.seconds(verifying.group_of(depth), depth) for depth in places}
        plain = {1 + depth: found[1 + depth] - guessing[verifying.group_of(depth)] for depth in places}
        # Without a draft, a sequence goes on in plain steps.
        return found | {1: max(plain[1], _PLAIN * found[1])}, plain

    @property
    def capacity(self) -> Capacity:
        return Capacity(verify=tuple(self.pipelines), drains_few=self._drains_few)

    @property
    def lookahead_tokens(self) -> int:
        """Covers what is in flight, and what a step reads before it launches more."""
        return max(self._lookahead(most).pages for most in self.pipelines)

    @property
    def max_tokens_per_row(self) -> int:
        return max(self._lookahead(most).tokens for most in self.pipelines)

    def _lookahead(self, most: int) -> Lookahead:
        return self.pipelines[most].lookahead[most]

    @property
    def read(self) -> Mapping[int, int]:
        return sum((pipeline.read for pipeline in self.pipelines.values()), Counter[int]())

    def in_flight(self, rows: tuple[Row, ...]) -> dict[int, int]:
        return {} if self._rows is None else self._rows.in_flight(rows)

    def drafts(self, step: StepRows) -> Drafts:
        return NO_DRAFTS if self._rows is None else self._rows.drafts(step)

    def run(self, share: Share, options: StepOptions) -> dict[int, RowResult]:
        assert self._rows is not None
        found = self._rows.run(share, options)
        if share.drain:
            for row in share.rows:
                self._devices[share.pipeline].computed(
                    self._sequences.of(row), row.start + len(found[row.key].token_ids)
                )
        return found

    def close(self) -> None:
        for device in self._devices.values():
            device.close()
        if self._behind is not None:
            self._behind.close()
