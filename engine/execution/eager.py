"""The executor that computes every row on every device by torch calls. The others are compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from types import MappingProxyType

import torch

from engine.api import TokenLogprob
from engine.execution.needs import require_known
from engine.execution.router import ALL_OPTIONS, Capacity, StepOptions
from engine.execution.step_state import Parts
from engine.loading.progress import Progress
from engine.model.attention import RowSpan, StepAttention
from engine.model.transformer import StepInput
from engine.sampling.sampler import token_logprobs
from engine.scheduling.plan import Row, RowResult, Share
from engine.scheduling.sequence_state import SequenceState
from engine.settings import PAGE_SIZE

Draft = tuple[int, ...]
NO_DRAFTS: Mapping[int, Draft] = MappingProxyType({})
SCORED_LOGITS = 1 << 24  # of a prompt, at a time: 64 MiB of float32; their logarithms take as much again


@dataclass(frozen=True, slots=True)
class PassOutput:
    """Both tensors are [positions, hidden], in the order of the pass's rows."""

    sampled: torch.Tensor  # from which tokens are chosen: one for each row that samples and each token of its draft
    scored: torch.Tensor  # of prompt tokens whose successors' log-probabilities are wanted


class Eager:
    """Packs the rows into one ragged batch, runs the model over it, samples."""

    lookahead_tokens = 0
    max_tokens_per_row = 1
    capacity = Capacity()

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._windows = tuple(dict.fromkeys(parts.model.config.windows))
        # On a CPU, `fused_kernels` is the walk in C over few tokens.
        cpu = parts.model.placement.device.type == "cpu"
        self.switches: Mapping[str, str | None] = {"fused_kernels": parts.model.why_not_fused} if cpu else {}

    def warmup(self, progress: Progress) -> None: ...

    def close(self) -> None: ...

    def run(self, share: Share, options: StepOptions) -> dict[int, RowResult]:
        ordered = in_order(share.rows)
        sampled = [row for row in ordered if row.sample]
        fed = self.feed(ordered, options)
        results: dict[int, RowResult] = {}
        if sampled:
            logits = self._parts.model.logits(fed.sampled)
            found = self._parts.sampler.sample([self._parts.sequences.of(row) for row in sampled], logits)
            results = {row.key: result for row, result in zip(sampled, found, strict=True)}
        return results | self.scored(ordered, fed, results)

    def feed(
        self, rows: Rows[Row], options: StepOptions = ALL_OPTIONS, drafts: Mapping[int, Draft] = NO_DRAFTS
    ) -> PassOutput:
        """Rows of one token must come first; `drafts`, keyed by row, may follow these alone."""
        self._use(options)
        hidden = self._parts.model.forward(self._pack(rows, drafts), self._parts.pool)
        sampled = sum(1 + len(drafts.get(row.key, ())) for row in rows if row.sample)
        return PassOutput(hidden[:sampled], hidden[sampled:])

    def _use(self, options: StepOptions) -> None:
        self._parts.model.fused = options.fused_kernels
        if self._parts.draft is not None:
            self._parts.draft.model.fused = options.fused_kernels

    def logits(self, rows: Rows[Row]) -> torch.Tensor | None:
        """Returns float32 [rows that sample, vocab]. Rows of one token must come first."""
        sampled = self.feed(rows).sampled
        return self._parts.model.logits(sampled) if sampled.shape[0] else None

    def rehearse(self, tokens: int, before: int) -> None:
        """Feeds `tokens` tokens behind `before` others, chooses after each, and waits. Overwrites the first pages."""
        model, device = self._parts.model, self._parts.model.placement.device
        pages = list(range(-(-(before + tokens) // PAGE_SIZE)))
        places = torch.arange(before, before + tokens, device=device)
        spans = [RowSpan(at, 1, before + at, pages) for at in range(tokens)]
        attention = StepAttention(spans, self._windows, self._parts.pool, device)
        hidden = model.forward(StepInput(places * 0, places, places, attention, None), self._parts.pool)
        model.logits(hidden).argmax(dim=-1).tolist()

    def scored(self, rows: Rows[Row], fed: PassOutput, results: Mapping[int, RowResult]) -> dict[int, RowResult]:
        model, found, first = self._parts.model, {}, 0
        most = max(1, SCORED_LOGITS // model.config.vocab_size)
        for row in rows:
            if not row.score:
                continue
            state = self._parts.sequences.of(row)
            after = torch.tensor(state.token_ids[row.start + 1 : _scores_to(row, state) + 1], device=fed.scored.device)
            scores: list[TokenLogprob] = []
            for at in range(0, len(after), most):
                tokens = after[at : at + most]
                logits = model.logits(fed.scored[first + at : first + at + len(tokens)])
                scores += token_logprobs(logits, tokens, [state.prompt_logprobs or 0] * len(tokens))
            first += len(after)
            found[row.key] = results.get(row.key, RowResult(())).scored(tuple(scores))
        return found

    def _pack(self, rows: Rows[Row], drafts: Mapping[int, Draft]) -> StepInput:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sampled: list[int] = []
        scored: list[int] = []
        spans: list[RowSpan] = []
        for row in rows:
            sequence, draft = self._parts.sequences.of(row), drafts.get(row.key, ())
            pages, end = sequence.pages, row.start + row.count + len(draft)
            if draft:  # each as a row of its own: all keys are written before any is read
                spans += [RowSpan(len(token_ids) + at, 1, row.start + at, pages) for at in range(1 + len(draft))]
            else:
                spans.append(RowSpan(len(token_ids), row.count, row.start, pages))
            token_ids += sequence.token_ids[row.start : row.start + row.count]
            token_ids += draft
            positions += range(row.start, end)
            slots += [pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in range(row.start, end)]
            if row.sample:
                sampled += range(len(token_ids) - 1 - len(draft), len(token_ids))
            if row.score:
                begin = len(token_ids) - row.count
                scored += range(begin, begin + _scores_to(row, sequence) - row.start)
        sampled += scored
        require_known((min(token_ids), max(token_ids)), self._parts.model.config.vocab_size)
        device = self._parts.model.placement.device
        packed = torch.tensor((token_ids, positions, slots), device=device)
        return StepInput(
            token_ids=packed[0],
            positions=packed[1],
            slots=packed[2],
            attention=StepAttention(spans, self._windows, self._parts.pool, device),
            sampled=torch.tensor(sampled, dtype=torch.int64, device=device)
            if scored or len(sampled) < len(token_ids)
            else None,
        )


def in_order(rows: Rows[Row]) -> list[Row]:
    """Sorts rows of one token before all others, as attention expects."""
    return sorted(rows, key=lambda row: row.count > 1)


def _scores_to(row: Row, state: SequenceState) -> int:
    """Returns the first position whose successor is not in the prompt."""
    return min(row.start + row.count, state.prompt_length - 1)
