"""Samples all rows at once, each by its own parameters.

Order: logit_bias, penalties (repetition over prompt and output, presence and frequency over output), stop tokens barred
until min_tokens, temperature, top_k, top_p, min_p, one draw. Each filter keeps what is at least as likely as the last
token it must keep, so that ties never depend on an order. What a row draws depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from engine.api import SamplingParams, TokenLogprob
from engine.constraints.constraints import Constraints
from engine.sampling.noise import gumbel, seed_key
from engine.sampling.token_history import TokenHistory
from engine.scheduling.plan import RowResult
from engine.scheduling.sequence_state import SequenceState

Tokens = tuple[int, ...]
NARROW = 128  # candidates that most filtered rows need; the others sort their whole vocabulary
NEVER = float("-inf")
COLDEST = 1e-20  # temperatures below it are not numbers in float32


@dataclass(frozen=True, slots=True)
class BatchParams:
    """Rebuilt when the set of rows changes."""

    sequences: tuple[SequenceState, ...]
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # rows, ids, values
    penalised: torch.Tensor | None  # rows with any penalty
    penalties: torch.Tensor  # [3, rows]: repetition, presence, frequency
    drawn: torch.Tensor | None  # rows that are not greedy
    keys: torch.Tensor  # of the drawn rows, as are those below
    temperature: torch.Tensor  # [drawn, 1]
    top_k: torch.Tensor  # [drawn, 1]; 0 where it keeps all
    top_p: torch.Tensor  # [drawn, 1] float64
    floor: torch.Tensor  # [drawn, 1]: log(min_p)
    filtered: bool  # whether any has top_k, top_p or min_p
    barred: tuple[int, ...]  # rows with a min_tokens
    constrained: tuple[int, ...]
    logprobs: tuple[int, ...]  # rows that want them


class Sampler:
    """Holds what the penalties must remember of each slot."""

    def __init__(
        self, vocab_size: int, slots: int, device: torch.device, constraints: Constraints | None = None
    ) -> None:
        self._constraints = constraints or Constraints()
        self._bits = torch.arange(8, dtype=torch.uint8, device=device)
        self._device = device
        self._vocab = vocab_size
        self._ids = torch.arange(vocab_size, device=device).unsqueeze(0)
        self._history = TokenHistory(vocab_size, slots, device)
        self._batch: BatchParams | None = None

    def sample(
        self, sequences: Rows[SequenceState], logits: torch.Tensor, assumed: Rows[Tokens] = ()
    ) -> list[RowResult]:
        """logits float32 [sequences, vocab] → one id each, or none where its logits are no numbers. Each row of a
        sequence is chosen as if the tokens `assumed` for it followed the sequence's last one."""
        batch = self._params(tuple(sequences))
        chosen = self._chosen(batch, logits, assumed)
        found = [RowResult((token,) if token >= 0 else ()) for token in chosen]
        for row in batch.constrained:
            if chosen[row] < 0 and bool(torch.isfinite(logits[row]).all()):
                found[row] = self._constraints.stuck(batch.sequences[row].key)
        asked = [row for row in batch.logprobs if chosen[row] >= 0]
        if asked:
            counts = [batch.sequences[row].logprobs or 0 for row in asked]
            tokens = [chosen[row] for row in asked]
            logprobs = token_logprobs(logits[self._integers(asked)], self._integers(tokens), counts)
            for row, token, one in zip(asked, tokens, logprobs, strict=True):
                found[row] = RowResult((token,), (one,))
        return found

    def choose(self, sequences: Rows[SequenceState], logits: torch.Tensor, assumed: Rows[Tokens] = ()) -> list[int]:
        """Returns -1 where there is no id; no log-probabilities."""
        return self._chosen(self._params(tuple(sequences)), logits, assumed)

    def _chosen(self, batch: BatchParams, logits: torch.Tensor, assumed: Rows[Tokens]) -> list[int]:
        assumed = assumed or [()] * len(batch.sequences)
        adjusted = self._adjust(batch, logits, assumed)
        if batch.drawn is None and adjusted is logits:
            # A NaN counts as the greatest of its row.
            best, ids = logits.max(dim=-1)
            sound = torch.isfinite(best)
        else:
            sound = torch.isfinite(logits.sum(dim=-1)) & torch.isfinite(adjusted.amax(dim=-1))
            ids = self._choose(batch, adjusted, assumed)
        chosen: list[int] = torch.where(sound, ids, -1).tolist()
        return chosen

    def _choose(self, batch: BatchParams, logits: torch.Tensor, assumed: Rows[Tokens]) -> torch.Tensor:
        if batch.drawn is None:
            return logits.argmax(dim=-1)
        lengths = [len(one.token_ids) + len(more) for one, more in zip(batch.sequences, assumed, strict=True)]
        positions = self._integers(lengths)
        if batch.drawn.numel() == len(batch.sequences):
            return self._draw(batch, logits, positions)
        drawn = self._draw(batch, logits.index_select(0, batch.drawn), positions.index_select(0, batch.drawn))
        return logits.argmax(dim=-1).index_copy_(0, batch.drawn, drawn)

    def _params(self, sequences: tuple[SequenceState, ...]) -> BatchParams:
        batch = self._batch
        if batch is None or batch.sequences != sequences:
            batch = self._batch = self._gather(sequences)
        return batch

    def _gather(self, sequences: tuple[SequenceState, ...]) -> BatchParams:
        params = [sequence.sampling for sequence in sequences]
        drawn = [row for row, one in enumerate(params) if one.temperature > 0]
        penalties = [(one.repetition_penalty, one.presence_penalty, one.frequency_penalty) for one in params]
        penalised = [row for row, one in enumerate(params) if _penalised(one)]

        def column(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device).unsqueeze(1)

        return BatchParams(
            sequences=sequences,
            bias=self._biases(params),
            penalised=self._integers(penalised) if penalised else None,
            penalties=column([value for row in penalised for value in penalties[row]]).view(len(penalised), 3).T,
            drawn=self._integers(drawn) if drawn else None,
            keys=self._integers([seed_key(params[row].seed) for row in drawn]),
            temperature=column([max(params[row].temperature, COLDEST) for row in drawn]),
            top_k=self._integers([min(params[row].top_k, self._vocab) for row in drawn]).unsqueeze(1),
            top_p=column([params[row].top_p for row in drawn], torch.float64),
            floor=column([params[row].min_p for row in drawn]).log(),
            filtered=any(_filtered(params[row]) for row in drawn),
            barred=tuple(row for row, one in enumerate(sequences) if one.stopping.min_tokens > 0),
            constrained=tuple(row for row, one in enumerate(sequences) if one.constraint is not None),
            logprobs=tuple(row for row, one in enumerate(sequences) if one.logprobs is not None),
        )

    def _biases(self, params: Rows[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        rows = [row for row, one in enumerate(params) for _ in one.logit_bias]
        if not rows:
            return None
        ids = [token for one in params for token, _ in one.logit_bias]
        values = [value for one in params for _, value in one.logit_bias]
        return self._integers(rows), self._integers(ids), torch.tensor(values, device=self._device)

    def _integers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _adjust(self, batch: BatchParams, logits: torch.Tensor, assumed: Rows[Tokens]) -> torch.Tensor:
        """Applies bias, penalties and bars; the same tensor where no row has any."""
        barred = [
            (row, token)
            for row in batch.barred
            if batch.sequences[row].output_length + len(assumed[row]) < batch.sequences[row].stopping.min_tokens
            for token in batch.sequences[row].stopping.stop_token_ids
        ]
        if batch.bias is None and batch.penalised is None and not barred and not batch.constrained:
            return logits
        logits = logits.clone()
        if batch.bias is not None:
            rows, ids, values = batch.bias
            logits.index_put_((rows, ids), values, accumulate=True)
        if batch.penalised is not None:
            rows = batch.penalised
            penalised = self._penalise(batch, logits.index_select(0, rows), assumed)
            logits.index_copy_(0, rows, penalised)
        if barred:
            rows, ids = (self._integers([pair[index] for pair in barred]) for index in range(2))
            logits.index_put_((rows, ids), torch.tensor(NEVER, device=self._device))
        if batch.constrained:
            self._bar(logits, batch, assumed)
        return logits

    def _bar(self, logits: torch.Tensor, batch: BatchParams, assumed: Rows[Tokens]) -> None:
        """Leaves constrained rows what their masks allow; ids beyond a mask have no text."""
        masks = [self._constraints.mask(batch.sequences[row].key, assumed[row]) for row in batch.constrained]
        packed = torch.frombuffer(bytearray().join(masks), dtype=torch.uint8).to(self._device).view(len(masks), -1)
        barred = (packed.unsqueeze(2) >> self._bits & 1 == 0).view(len(masks), -1)[:, : self._vocab]
        rows = self._integers(list(batch.constrained))
        left = torch.full((len(masks), self._vocab), NEVER, device=self._device)
        known = barred.shape[1]
        left[:, :known] = logits.index_select(0, rows)[:, :known].masked_fill_(barred, NEVER)
        logits.index_copy_(0, rows, left)

    def _penalise(self, batch: BatchParams, logits: torch.Tensor, assumed: Rows[Tokens]) -> torch.Tensor:
        rows = [row for row, sequence in enumerate(batch.sequences) if _penalised(sequence.sampling)]
        seen, counts = self._history.of([batch.sequences[row] for row in rows])
        later = [(at, token) for at, row in enumerate(rows) for token in assumed[row]]
        if later:
            where = self._integers([at for at, _ in later]), self._integers([token for _, token in later])
            seen.index_put_(where, torch.tensor(True, device=self._device))
            counts.index_put_(where, torch.tensor(1.0, device=self._device), accumulate=True)
        repetition, presence, frequency = batch.penalties.unsqueeze(2).unbind(0)
        weaker = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, weaker, logits)
        return logits - presence * (counts > 0) - frequency * counts

    def _draw(self, batch: BatchParams, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # Less the best, before a tiny temperature could overflow.
        heat = (logits - logits.amax(dim=-1, keepdim=True)) / batch.temperature
        if not batch.filtered:
            return self._draw_wide(batch.keys, positions, heat, batch.floor)
        count = min(NARROW, self._vocab)
        tops, candidates = heat.topk(count, dim=-1)
        mass = heat.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
        least = torch.maximum(lowest_kept(tops, batch.top_k, batch.top_p, mass), batch.floor)
        scores = tops + gumbel(batch.keys, positions, candidates)
        found = candidates.gather(1, scores.masked_fill_(tops < least, NEVER).argmax(dim=-1, keepdim=True)).squeeze(1)
        if count == self._vocab:
            return found
        # Decided over the whole vocabulary: rows whose last candidate is still in, and those whose top_p is a share of
        # more candidates than there are here.
        left = tops[:, -1:]  # behind one that a constraint bars all are barred
        undecided = (~(left < least) & (left > NEVER)) | ((batch.top_k > count) & (batch.top_p < 1))
        open_rows = undecided.squeeze(1).nonzero().squeeze(1)
        if open_rows.numel() == 0:
            return found
        heat, keys, positions = heat[open_rows], batch.keys[open_rows], positions[open_rows]
        ordered = heat.sort(dim=-1, descending=True).values
        kept = lowest_kept(ordered, batch.top_k[open_rows], batch.top_p[open_rows], mass[open_rows])
        least = torch.maximum(kept, batch.floor[open_rows])
        return found.index_copy_(0, open_rows, self._draw_wide(keys, positions, heat, least))

    def _draw_wide(
        self, keys: torch.Tensor, positions: torch.Tensor, heat: torch.Tensor, least: torch.Tensor
    ) -> torch.Tensor:
        scores = heat + gumbel(keys, positions, self._ids)
        return scores.masked_fill_(heat < least, NEVER).argmax(dim=-1)


def _penalised(one: SamplingParams) -> bool:
    return (one.repetition_penalty, one.presence_penalty, one.frequency_penalty) != (1.0, 0.0, 0.0)


def _filtered(one: SamplingParams) -> bool:
    return one.top_k > 0 or one.top_p < 1 or one.min_p > 0


def lowest_kept(ordered: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """The least log-weight [rows, 1] that top_k and then top_p keep.

    ordered [rows, n] descends; mass [rows, 1] is the weight of all tokens. Where n do not suffice: the last.
    """
    last = ordered.shape[1] - 1
    weights = ordered.to(torch.float64).exp().cumsum(dim=-1)
    of_k = torch.where(top_k > 0, top_k - 1, last).clamp_(max=last)
    # top_p takes its share of what top_k left; unknown where that lies beyond n.
    left = weights.gather(1, of_k).masked_fill_(top_k > last + 1, float("inf"))
    mass = torch.where(top_k > 0, left, mass)
    of_p = torch.where(top_p < 1, (weights < top_p * mass).sum(dim=-1, keepdim=True), last)
    return ordered.gather(1, torch.minimum(of_k, of_p).clamp_(max=last))


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, counts: Rows[int]) -> list[TokenLogprob]:
    """Rows [rows, vocab]: each one's token, and `counts` best ones."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    best = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprob(logprob, tuple(zip(ids[:count], values[:count], strict=True)))
        for logprob, count, (ids, values) in zip(chosen, counts, tops, strict=True)
    ]
