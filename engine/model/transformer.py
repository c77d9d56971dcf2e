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
from engine.model.layers.eager import EagerWalk, Tokens
from engine.model.layers.few_rows_cpu import MOST_ROWS, FewRows, open_few_rows
from engine.model.rope import RopeTables
from engine.model.weights import Weights
from quant.checkpoint.config import ModelConfig


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
    """The walk in C takes a few tokens on a CPU, while `fused`."""

    def __init__(self, config: ModelConfig, weights: Weights, ropes: RopeTables, placement: Placement) -> None:
        self.config = config
        self.weights = weights
        self.ropes = ropes
        self.placement = placement
        self._embedding_scale = config.embedding_scale
        if config.embedding_scale_rounded:
            self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=weights.embedding.dtype))
        self.fused = True
        self._eager = EagerWalk(config, weights.layers, ropes, placement.activations.dtype)
        few_rows = open_few_rows(config, weights, ropes.full, placement)
        self._few_rows = few_rows if isinstance(few_rows, FewRows) else None
        self.why_not_fused = None if isinstance(few_rows, FewRows) else few_rows

    @property
    def rope(self) -> torch.Tensor:
        """[positions, 2, head_dim]: the angles of layers without a window, and of all where `ropes` has no others."""
        return self.ropes.full

    def forward(self, step: StepInput, cache: KvCache) -> torch.Tensor:
        """Hidden states [sampled, hidden] before the last norm, float32. Writes keys and values to the cache."""
        x = functional.embedding(step.token_ids, self.weights.embedding).float()
        if self._embedding_scale != 1.0:
            x.mul_(self._embedding_scale)
        spans = step.attention.spans
        if self.fused and self._few_rows is not None and self._few_rows.takes(spans, cache):
            self._few_rows.forward(x, spans, step.positions, step.slots, cache)
        else:
            self._eager.forward(x, Tokens(step.positions, step.slots, step.attention, cache))
        return x if step.sampled is None else x.index_select(0, step.sampled)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab], float32."""
        if self.fused and self._few_rows is not None and hidden.shape[0] <= MOST_ROWS:
            return self._few_rows.logits(hidden)
        weights = self.weights
        return weights.head(weights.norm(hidden).to(self.placement.activations.dtype)).float()
