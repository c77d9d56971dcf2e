"""Guesses by a small model with the target's vocabulary, token by token, for all rows at once. It draws with the
target's sampling fields and noise, so that where the distributions agree, they mostly draw the same token. Its keys and
values lie in a pool of its own under the numbers of the target's pages."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial

import torch

from engine.api import GREEDY, Stopping
from engine.execution.speculation.costs import Costs, clock_of, measure
from engine.execution.speculation.proposer import MOST_DRAFTED, Draft, DraftRequest
from engine.kv.kv_cache import KvCache
from engine.model.attention import RowSpan, StepAttention
from engine.model.transformer import StepInput, Transformer
from engine.sampling.sampler import Sampler
from engine.scheduling.sequence_state import PerSequence, SequenceState
from engine.settings import PAGE_SIZE

_CHUNK = 512  # tokens of a prompt that it takes in at once
_LACKED = 2  # tokens behind a draft that was right: its last one was never fed, and the target said another


@dataclass(slots=True)
class Followed:
    sequence: SequenceState
    computed: int = 0  # tokens of the sequence
    guessed: tuple[int, ...] = ()  # that it computed behind those

    def pending(self) -> list[int]:
        """Returns the tokens to compute, at least one: guesses that came true are computed."""
        ids = self.sequence.token_ids
        for token_id in self.guessed:
            if self.computed == len(ids) - 1 or ids[self.computed] != token_id:
                break
            self.computed += 1
        self.guessed = ()
        return ids[self.computed :]


class DraftModel:
    """A `Proposer` with weights of its own."""

    name = "draft_model"

    def __init__(self, model: Transformer, pool: KvCache, sampler: Sampler) -> None:
        self.model = model
        self.pool = pool
        self._sampler = sampler
        self._windows = tuple(dict.fromkeys(model.config.windows))
        self._followed = PerSequence(Followed, paged=True)
        self._first = self._further = Costs({1: 0.0})  # steps for so many sequences

    def measure(self, target: Callable[[], None]) -> None:
        most = min(self.pool.pages * PAGE_SIZE, self.model.rope.shape[0])
        clock = clock_of(self.model.placement.device)
        self._first = measure(partial(self._rehearse, _LACKED), most, clock, between=target)
        self._further = measure(partial(self._rehearse, 1), most, clock)

    def seconds(self, rows: int, depth: int) -> float:
        """Leaves out tokens of a prompt, which are computed once."""
        return self._first.seconds(rows) + (depth - 1) * self._further.seconds(rows) if depth else 0.0

    def reach(self, sequence: SequenceState) -> int:
        return MOST_DRAFTED

    def propose(self, requests: Items[DraftRequest]) -> list[Draft]:
        """A failure discards what was computed of these sequences."""
        try:
            return self._propose(requests)
        except BaseException:
            for request in requests:
                self._followed.forget(request.sequence)
            raise

    def _propose(self, requests: Items[DraftRequest]) -> list[Draft]:
        drafts: list[list[int]] = [[] for _ in requests]
        followed = [self._followed.of(request.sequence) for request in requests]
        fed = [self._catch_up(one) for one in followed]
        for depth in range(max(request.most for request in requests)):
            going = [at for at, request in enumerate(requests) if len(drafts[at]) == depth < request.most]
            if not going:
                break
            going.sort(key=lambda at: len(fed[at]) > 1)  # as attention wants them
            logits = self._feed([(followed[at], fed[at]) for at in going])
            for at in going:
                followed[at].computed += len(fed[at])
            sequences = [followed[at].sequence for at in going]
            chosen = self._sampler.choose(sequences, logits, [tuple(drafts[at]) for at in going])
            for at, token_id in zip(going, chosen, strict=True):
                if token_id >= 0:
                    drafts[at].append(token_id)
                    fed[at] = [token_id]
        for one, draft in zip(followed, drafts, strict=True):
            one.computed = len(one.sequence.token_ids)
            one.guessed = tuple(draft[:-1])
        return [tuple(draft) for draft in drafts]

    def _catch_up(self, one: Followed) -> list[int]:
        """Returns the last chunk of the pending tokens, before which all are computed."""
        pending = one.pending()
        while len(pending) > _CHUNK:
            self._feed([(one, pending[:_CHUNK])])
            one.computed += _CHUNK
            pending = pending[_CHUNK:]
        one.computed = len(one.sequence.token_ids) - len(pending)
        return pending

    def _feed(self, rows: Items[tuple[Followed, list[int]]]) -> torch.Tensor:
        """Returns logits behind each row's last token. Rows of one token must come first."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last: list[int] = []
        spans: list[RowSpan] = []
        for one, ids in rows:
            pages, start = one.sequence.pages, one.computed
            spans.append(RowSpan(len(token_ids), len(ids), start, pages))
            token_ids += ids
            positions += range(start, start + len(ids))
            slots += [pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in range(start, start + len(ids))]
            last.append(len(token_ids) - 1)
        device = self.model.placement.device
        packed = torch.tensor((token_ids, positions, slots), device=device)
        attention = StepAttention(spans, self._windows, self.pool, device)
        sampled = None if len(last) == len(token_ids) else torch.tensor(last, dtype=torch.int64, device=device)
        step = StepInput(packed[0], packed[1], packed[2], attention, sampled)
        return self.model.logits(self.model.forward(step, self.pool))

    def _rehearse(self, lacked: int, rows: int, before: int) -> None:
        pages = list(range(-(-(before + lacked) // PAGE_SIZE)))
        stand_in = SequenceState(-1, -1, [], 0, GREEDY, Stopping(max_tokens=1), None, pages=pages)
        logits = self._feed([(Followed(stand_in, before), [0] * lacked)] * rows)
        self._sampler.choose([stand_in] * rows, logits)
