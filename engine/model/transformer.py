"""The decoder-only transformer of all families: ids of a ragged step in, hidden states and logits out.

It has no state but weights: pages, positions and masks are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.kv.kv_cache import KvCache, KvShape
from engine.linear import Placement
from engine.model.attention import StepAttention
from engine.model.layers.cpu_walk import MOST_ROWS, CpuWalk, open_cpu_walk
from engine.model.layers.eager import EagerWalk, Tokens
from engine.model.layers.parallel import RankExchange, embedded, summed, whole_logits
from engine.model.rope import RopeTables
from engine.model.weights import Weights
from quant.checkpoint.config import ModelConfig

SPLIT = "each process of a split model computes a part of a layer (tensor-parallel), and the walk in C whole ones"


def kv_shape(config: ModelConfig) -> KvShape:
    return KvShape(config.layers, config.kv_heads, config.head_dim)


@dataclass(frozen=True, slots=True)
class StepInput:
    """A step's rows, one after another."""

    token_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [tokens]: where keys and values go
    attention: StepAttention
    sampled: torch.Tensor | None  # tokens that are followed by a new one; None: all


class Transformer:
    """The walk in C takes a few tokens on a CPU, while `fused`.

    Of a split model, `config` and `weights` are this rank's, and all ranks call the same methods in the same order.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ropes: RopeTables,
        placement: Placement,
        exchange: RankExchange | None = None,
    ) -> None:
        """`exchange`: with the other ranks of a split model."""
        self.config = config
        self.weights = weights
        self.ropes = ropes
        self.placement = placement
        self.embedding_scale = config.embedding_scale
        if config.embedding_scale_rounded:
            self.embedding_scale = float(torch.tensor(config.embedding_scale, dtype=weights.embedding.dtype))
        self.fused = True
        self._exchange = exchange
        layers = weights.layers if exchange is None else tuple(summed(one, exchange) for one in weights.layers)
        self._eager = EagerWalk(config, layers, ropes, placement.activations.dtype)
        walk = SPLIT if exchange is not None else open_cpu_walk(config, weights, ropes.full, placement)
        self._walk = walk if isinstance(walk, CpuWalk) else None
        self.why_not_fused = None if isinstance(walk, CpuWalk) else walk

    @property
    def rope(self) -> torch.Tensor:
        """[positions, 2, head_dim]: the angles of layers without a window, and of all where `ropes` has no others."""
        return self.ropes.full

    def forward(self, step: StepInput, cache: KvCache) -> torch.Tensor:
        """Hidden states [sampled, hidden] before the last norm, float32. Writes keys and values to the cache."""
        x = self.embedded(step.token_ids)
        spans = step.attention.spans
        if self.fused and self._walk is not None and self._walk.takes(spans, cache):
            self._walk.forward(x, spans, step.positions, step.slots, cache)
        else:
            self._eager.forward(x, Tokens(step.positions, step.slots, step.attention, cache))
        return x if step.sampled is None else x.index_select(0, step.sampled)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [tokens] → float32 [tokens, hidden], scaled."""
        if self._exchange is None or not self._exchange.part.splits_vocabulary:
            x = functional.embedding(ids, self.weights.embedding).float()
        else:
            x = embedded(ids, self.weights.embedding, self.config.vocab_size, self._exchange)
        return x if self.embedding_scale == 1.0 else x.mul_(self.embedding_scale)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab], float32; of a split model on the first rank, which gives the others its
        hidden states. There they get what their own part of the head computes."""
        if self.fused and self._walk is not None and hidden.shape[0] <= MOST_ROWS:
            return self._walk.logits(hidden)
        weights = self.weights
        split = self._exchange is not None and self._exchange.part.splits_vocabulary
        if split and self._exchange is not None:
            hidden = self._exchange.share(hidden.contiguous())
        own = weights.head(weights.norm(hidden).to(self.placement.activations.dtype)).float()
        if not split or self._exchange is None:
            return own
        whole = whole_logits(own, self.config.vocab_size, self._exchange)
        return own if whole is None else whole
