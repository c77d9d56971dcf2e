"""The executor of captured rounds: one sequence that decodes alone on a GPU, with drafts that never leave it. A draft
model guesses where there is one, else prompt lookup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from engine.execution import forward_pass
from engine.execution.capture import Recorder
from engine.execution.graph_decode import executor as graph_decode
from engine.execution.graph_decode import weights
from engine.execution.speculation.captured.captured_rounds import CapturedRounds
from engine.execution.speculation.captured.catching_up import CatchingUp
from engine.execution.speculation.captured.depths import PaidDepths
from engine.execution.speculation.captured.draft_steps import DeviceDraft
from engine.execution.speculation.captured.rounds import GROUPS, RoundPipeline, ahead_of
from engine.execution.speculation.captured.single import PATIENCE, SingleRow, group_of
from engine.execution.speculation.costs import Costs
from engine.execution.speculation.draft_model import DraftModel
from engine.execution.step_state import DecodeWeights, Parts, Unfit
from engine.kernels.build import BuildError
from engine.loading.progress import Progress
from engine.scheduling.plan import Row, RowResult

NO_DRAFT = "draft-model names none"
why_not = graph_decode.why_not


def ask(parts: Parts) -> None:
    """Asks for every kernel that it will have; of shapes alone."""
    read, _ = weights.shared(parts)
    behind = _catching_up(parts)
    CapturedRounds(parts.kernels, read, parts.max_context, draft=_draft(parts, behind)).build()
    if behind is not None:
        behind.ask()


def why_no_draft(parts: Parts) -> str | None:
    """Why a draft model cannot guess here, or None."""
    if parts.draft is None:
        return NO_DRAFT
    draft = _of_draft(parts, parts.draft)
    return weights.why_not(draft) or forward_pass.why_not(draft)


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
    return DeviceDraft(read, behind.compute)


class CapturedSpeculation:
    """Decodes the only row of a step that decodes, where drafts pay."""

    def __init__(self, parts: Parts, known: Costs | None = None) -> None:
        """`known` instead of what would be measured."""
        self.costs = known  # of rounds, their drafts included; None until they are measured
        with torch.inference_mode():
            try:
                read, self._why_one_pass = weights.shared(parts)
                self._behind = _catching_up(parts)
                draft = _draft(parts, self._behind)
                self._device = CapturedRounds(parts.kernels, read, parts.max_context, draft=draft)
                self._device.build(GROUPS[:1])
            except (BuildError, torch.OutOfMemoryError) as failure:
                raise Unfit(" ".join(str(failure).split())[:300]) from failure
        self._guesser = None if draft is None else parts.draft
        self._recorder = Recorder(parts.model.placement.device)
        self._sequences = parts.sequences
        self._pipeline = RoundPipeline(self._device, parts.sequences, parts.max_context)
        self._single: SingleRow | None = None  # until costs are known
        self._switches = {"speculation": True, "fused_kernels": True}

    def warmup(self, progress: Progress) -> None:
        """Compiles, captures, and measures what a round costs."""
        with torch.inference_mode():
            if self._behind is not None:
                self._behind.warmup(self._recorder, progress)
            self._device.warmup(progress)
            measured = {group: self._device.seconds(group) for group in GROUPS}
        # A round of one row more than a group has costs what the next group does.
        self.costs = self.costs or Costs({1 + depth: measured[group_of(depth)] for depth in range(GROUPS[-1])})
        self._pipeline.ahead = ahead_of(measured[1])
        depths = PaidDepths(self.costs, self._guesser, None if self._behind is None else self._behind.seconds)
        # A draft model sees what is fed in its rounds, and nothing of rounds without a draft.
        patience = PATIENCE if self._guesser is None else 0
        self._single = SingleRow(self._pipeline, self._sequences, depths, patience)
        self._apply()

    @property
    def lookahead_tokens(self) -> int:
        """All that is under way may be right, and all that a step reads before it launches more."""
        return self._pipeline.ahead.lookahead

    @property
    def max_tokens_per_row(self) -> int:
        """All that was under way."""
        return self._pipeline.ahead.tokens

    @property
    def read(self) -> Mapping[int, int]:
        """Rounds that were read, by rows."""
        return dict(self._pipeline.read)

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """The one row of one token, where a draft is expected to pay."""
        return () if self._single is None else self._single.claims(rows)

    def run(self, rows: tuple[Row, ...]) -> dict[int, RowResult]:
        """One id or several."""
        assert self._single is not None
        return self._single.run(rows)

    @property
    def switches(self) -> Mapping[str, str | None]:
        """It is off without kernels of our own, and launches and reads the head as `graph_decode` does."""
        return {"speculation": None, "graphs": None, "fused_kernels": None, "two_pass_head": self._why_one_pass}

    def switch(self, name: str, enabled: bool) -> None:
        """As `graph_decode`; `speculation`: off, it claims nothing but what is under way."""
        if name == "graphs":
            self._device.graphs = enabled
        elif name == "two_pass_head":
            self._device.two_pass = enabled
        elif name in self._switches:
            self._switches[name] = enabled
            self._apply()

    def _apply(self) -> None:
        if self._single is not None:
            self._single.enabled = all(self._switches.values())

    def close(self) -> None:
        """Gives the graphs back."""
        self._device.close()
        if self._behind is not None:
            self._behind.close()
