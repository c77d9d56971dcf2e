"""The executor of captured rounds on a GPU, with drafts that never leave it: of one sequence that decodes alone,
or of two to four together. A draft model guesses where there is one, else prompt lookup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch

from engine.execution.capture import Recorder
from engine.execution.graph_decode import executor as graph_decode
from engine.execution.graph_decode import weights
from engine.execution.speculation.captured.captured_rounds import CapturedRounds
from engine.execution.speculation.captured.catching_up import CatchingUp
from engine.execution.speculation.captured.claiming import RoundRows, Way
from engine.execution.speculation.captured.depths import PaidDepths
from engine.execution.speculation.captured.draft_steps import DeviceDraft
from engine.execution.speculation.captured.outlook import DraftOutlook, LookupOutlook, Outlook
from engine.execution.speculation.captured.rounds import GROUPS, TURN, RoundPipeline, ahead_of
from engine.execution.speculation.captured.single import BEGINNING, PATIENCE, Alone, group_of
from engine.execution.speculation.captured.together import Together
from engine.execution.speculation.costs import Costs
from engine.execution.speculation.draft_model import DraftModel
from engine.execution.speculation.lookup import PromptLookup
from engine.execution.speculation.proposer import Proposer
from engine.execution.step_state import DecodeWeights, Parts, Unfit
from engine.kernels.build import BuildError
from engine.loading.progress import Progress
from engine.model.layers import many_tokens
from engine.scheduling.plan import Row, RowResult

NO_DRAFT = "draft-model names none"
SEVERAL: Final = {2: 4, 4: 2}  # sequences: rows of each. Products keep a row's sums up to eight rows
_PLAIN = 0.9  # of a round without a draft: a plain step takes no less. What one short kernel takes is timed badly
why_not = graph_decode.why_not


def ask(parts: Parts) -> None:
    """Asks for every kernel that it will have; of shapes alone."""
    behind = _catching_up(parts)
    for device in _devices(parts, behind).values():
        device.build()
    if behind is not None:
        behind.ask()


def why_no_draft(parts: Parts) -> str | None:
    """Why a draft model cannot guess here, or None."""
    if parts.draft is None:
        return NO_DRAFT
    draft = _of_draft(parts, parts.draft)
    return weights.why_not(draft) or many_tokens.why_not(draft)


def _of_draft(parts: Parts, draft: DraftModel) -> Parts:
    """The draft model as the kernels are told of a model."""
    return replace(parts, model=draft.model, pool=draft.pool, decode=DecodeWeights(), draft=None)


def _catching_up(parts: Parts) -> CatchingUp | None:
    """None where no draft model guesses."""
    if parts.draft is None or why_no_draft(parts) is not None:
        return None
    return CatchingUp(_of_draft(parts, parts.draft))


def _draft(parts: Parts, behind: CatchingUp | None) -> DeviceDraft | None:
    if parts.draft is None or behind is None:
        return None
    read, _ = weights.shared(_of_draft(parts, parts.draft))
    return DeviceDraft(read, behind.compute, behind.followed.computed)


def _devices(parts: Parts, behind: CatchingUp | None) -> dict[int, CapturedRounds]:
    """By the most sequences of each."""
    read, _ = weights.shared(parts)
    draft = _draft(parts, behind)
    alone = CapturedRounds(parts.kernels, read, parts.max_context, draft=draft)
    found = {1: alone}
    for sequences, group in SEVERAL.items():
        if parts.max_sequences > sequences // 2:
            found[sequences] = CapturedRounds(
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
    """Decodes all rows that decode, where drafts pay."""

    def __init__(self, parts: Parts, known: Costs | None = None) -> None:
        """`known` instead of what would be measured."""
        self.costs = known  # of rounds, their drafts included; None until they are measured
        with torch.inference_mode():
            try:
                _, self._why_one_pass = weights.shared(parts)
                self._behind = _catching_up(parts)
                self._devices = _devices(parts, self._behind)
                self._devices[1].build(GROUPS[:1])
            except (BuildError, torch.OutOfMemoryError) as failure:
                raise Unfit(" ".join(str(failure).split())[:300]) from failure
        self._guesser = None if self._behind is None else parts.draft
        self._recorder = Recorder(parts.model.placement.device)
        self._sequences = parts.sequences
        self.pipelines = {  # by the most sequences of each
            most: RoundPipeline(device, parts.sequences, parts.max_context) for most, device in self._devices.items()
        }
        self._rows: RoundRows | None = None  # until costs are known
        self.waits = False  # see `sharing.TakingOver`: while a host takes a turn, short steps come to little
        self._switches = {"speculation": True, "fused_kernels": True}

    def warmup(self, progress: Progress) -> None:
        """Compiles, captures, and measures what a round costs."""
        with torch.inference_mode():
            if self._behind is not None:
                self._behind.warmup(self._recorder, progress)
            for device in self._devices.values():
                device.warmup(progress)
            alone, plain = self._measured()
            several = {
                most: device.seconds(SEVERAL[most], SEVERAL[most] - 1)
                for most, device in self._devices.items()
                if most > 1
            }
        known, self.costs = self.costs, self.costs or Costs(alone)
        lookup = PromptLookup()
        proposer: Proposer = lookup if self._guesser is None else self._guesser
        plain_steps = known or Costs(plain)
        self.waits = plain[1] >= TURN
        turn = 0.0 if self.waits else TURN
        depths = PaidDepths(self.costs, proposer, None if self._behind is None else self._behind.seconds, turn)
        outlook: Outlook = LookupOutlook(lookup) if self._guesser is None else DraftOutlook(depths)
        # A draft model sees what is fed in its rounds, and nothing of rounds without a draft. Whoever waits for plain
        # steps under way loses none by beginning with them.
        patience = PATIENCE if self._guesser is None else 0
        ways = {1: Way(self.pipelines[1], Alone(depths, patience, 0 if self.waits else min(patience, BEGINNING)))}
        for most, seconds in several.items():
            paid = seconds if known is None else known.seconds(GROUPS[-1])
            ways[most] = Way(self.pipelines[most], Together(SEVERAL[most], paid, plain_steps.seconds, outlook, turn))
        for most, seconds in {1: alone[1], **several}.items():
            self.pipelines[most].ahead = ahead_of(seconds)
        self._rows = RoundRows(ways, self._sequences)
        self._apply()

    def _measured(self) -> tuple[dict[int, float], dict[int, float]]:
        """Seconds of a round of one sequence by its rows, newest token and draft, and of a plain step of as many
        sequences, which costs no less than the round without its guesses: that reads fewer pages."""
        device, places = self._devices[1], range(GROUPS[-1])
        if self._guesser is None:  # those of a group cost the same
            groups = {group: device.seconds(group, group - 1) for group in GROUPS}
            found = {1 + depth: groups[group_of(depth)] for depth in places}
            return found, found
        guessing = {group: device.guessing_seconds(group) for group in GROUPS}
        found = {1 + depth: device.seconds(group_of(depth), depth) for depth in places}
        plain = {1 + depth: found[1 + depth] - guessing[group_of(depth)] for depth in places}
        # Without a draft, a sequence goes on in plain steps.
        return found | {1: max(plain[1], _PLAIN * found[1])}, plain

    @property
    def lookahead_tokens(self) -> int:
        """All that is under way may be right, and all that a step reads before it launches more."""
        return max(one.ahead.lookahead for one in self.pipelines.values())

    @property
    def max_tokens_per_row(self) -> int:
        """All that was under way."""
        return max(one.ahead.tokens for one in self.pipelines.values())

    @property
    def read(self) -> Mapping[int, int]:
        """Rounds that were read, by rows of a sequence."""
        return sum((pipeline.read for pipeline in self.pipelines.values()), Counter[int]())

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Rows of one token, all of them or none, where drafts are expected to pay."""
        return () if self._rows is None else self._rows.claims(rows)

    def run(self, rows: tuple[Row, ...]) -> dict[int, RowResult]:
        """One id or several."""
        assert self._rows is not None
        return self._rows.run(rows)

    @property
    def switches(self) -> Mapping[str, str | None]:
        """It is off without kernels of our own, and launches and reads the head as `graph_decode` does."""
        return {"speculation": None, "graphs": None, "fused_kernels": None, "two_pass_head": self._why_one_pass}

    def switch(self, name: str, enabled: bool) -> None:
        """As `graph_decode`; `speculation`: off, it claims nothing but what is under way."""
        if name in ("graphs", "two_pass_head"):
            for device in self._devices.values():
                device.switch(name, enabled)
        elif name in self._switches:
            self._switches[name] = enabled
            self._apply()

    def _apply(self) -> None:
        if self._rows is not None:
            self._rows.enabled = all(self._switches.values())

    def close(self) -> None:
        """Gives the graphs back."""
        for device in self._devices.values():
            device.close()
        if self._behind is not None:
            self._behind.close()
