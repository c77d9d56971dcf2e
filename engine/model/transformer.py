"""The decoder-only transformer of all families: ids of a ragged step in, hidden states and logits out.

It has no state but weights: pages, positions and masks are arguments. The residual stream, and activations between a
projection and the KV cache, are float32 whatever the weights are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.kv.kv_cache import KvCache, KvShape
from engine.linear import Placement
from engine.model.attention import StepAttention
from engine.model.few_rows import MOST_ROWS, FewRows, open_few_rows
from engine.model.rope import RopeTables
from engine.model.weights import Layer, Weights
from quant.checkpoint.config import ModelConfig

Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines


def kv_shape(config: ModelConfig) -> KvShape:
    """What the model keeps of each token."""
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
    """The model: weights, and the angles of its positions. A few tokens on a CPU go by the walk in C, while `fused`."""

    def __init__(self, config: ModelConfig, weights: Weights, ropes: RopeTables, placement: Placement) -> None:
        self.config = config
        self.weights = weights
        self.ropes = ropes
        self.placement = placement
        self.fused = True
        few_rows = open_few_rows(config, weights, ropes.full, placement)
        self._few_rows = few_rows if isinstance(few_rows, FewRows) else None
        self.why_not_fused = None if isinstance(few_rows, FewRows) else few_rows

    @property
    def rope(self) -> torch.Tensor:
        """[positions, 2, head_dim]: the angles of layers without a window, and of all where `ropes` has no others."""
        return self.ropes.full

    def forward(self, step: StepInput, cache: KvCache) -> torch.Tensor:
        """Writes keys and values to the cache. Hidden states [sampled, hidden] before the last norm, float32."""
        x = functional.embedding(step.token_ids, self.weights.embedding).float()
        if self.config.embedding_scale != 1.0:
            # In the embedding's type, in which the model was trained to be scaled.
            x.mul_(float(torch.tensor(self.config.embedding_scale, dtype=self.weights.embedding.dtype)))
        spans = step.attention.spans
        if self.fused and self._few_rows is not None and self._few_rows.takes(spans, cache):
            self._few_rows.forward(x, spans, step.positions, step.slots, cache)
        else:
            self._eager(x, step, cache)
        return x if step.sampled is None else x.index_select(0, step.sampled)

    def _eager(self, x: torch.Tensor, step: StepInput, cache: KvCache) -> None:
        full = windowed = _angles(self.ropes.full, step.positions)
        if self.ropes.windowed is not None:
            windowed = _angles(self.ropes.windowed, step.positions)
        for index, layer in enumerate(self.weights.layers):
            x.add_(self._attend(index, layer, x, full if layer.window is None else windowed, step, cache))
            x.add_(self._feed(layer, x))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab], float32."""
        if self.fused and self._few_rows is not None and hidden.shape[0] <= MOST_ROWS:
            return self._few_rows.logits(hidden)
        weights = self.weights
        return weights.head(weights.norm(hidden).to(self.placement.activations.dtype)).float()

    def _attend(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        angles: Angles,
        step: StepInput,
        cache: KvCache,
    ) -> torch.Tensor:
        config = self.config
        qkv = layer.qkv(layer.input_norm(x).to(self.placement.activations.dtype)).view(x.shape[0], -1, config.head_dim)
        turned = qkv[:, : config.heads + config.kv_heads]
        _rotate(turned, layer, angles)
        cache.write(index, step.slots, qkv[:, config.heads :])
        found = step.attention(index, layer.window, turned[:, : config.heads])
        output = layer.output(found.reshape(x.shape[0], -1))
        return output if layer.output_norm is None else layer.output_norm(output.float())

    def _feed(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(layer.mlp_norm(x).to(self.placement.activations.dtype)).chunk(2, dim=-1)
        gate = functional.silu(gate) if self.config.activation == "silu" else functional.gelu(gate, approximate="tanh")
        down = layer.down(gate.mul_(up))
        return down if layer.down_norm is None else layer.down_norm(down.float())


def _angles(table: torch.Tensor, positions: torch.Tensor) -> Angles:
    """Returns cosines and sines of these positions, each [tokens, 1, head_dim]."""
    cos, sin = table.index_select(0, positions).unsqueeze(1).unbind(2)
    return cos, sin


def _rotate(heads: torch.Tensor, layer: Layer, angles: Angles) -> None:
    """Normalises (where the model does) and rotates queries and keys [tokens, heads, head_dim] in place."""
    cos, sin = angles
    x = heads.float() if layer.head_norm is None else layer.head_norm(heads.float())
    tokens, count, dim = x.shape
    swapped = x.view(tokens, count, 2, dim // 2).flip(2).view(tokens, count, dim)
    if heads.dtype == torch.float32:
        torch.addcmul(x * cos, swapped, sin, out=heads)
    else:
        heads.copy_(torch.addcmul(x * cos, swapped, sin))
