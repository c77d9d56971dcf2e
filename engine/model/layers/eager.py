"""The walk over the layers in torch, which computes every feature on any device. The residual stream, and activations
between a projection and the KV cache, are float32 whatever the weights are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.kv.kv_cache import KvCache
from engine.model.attention import StepAttention
from engine.model.rope import RopeTables
from engine.model.weights import Layer
from quant.checkpoint.config import ModelConfig

Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines


@dataclass(frozen=True, slots=True)
class Tokens:
    positions: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [tokens]: where keys and values go
    attention: StepAttention
    cache: KvCache


@dataclass(frozen=True, slots=True)
class EagerWalk:
    config: ModelConfig
    layers: tuple[Layer, ...]
    ropes: RopeTables
    dtype: torch.dtype  # of what linears take and give

    def forward(self, x: torch.Tensor, tokens: Tokens) -> None:
        """x float32 [tokens, hidden]: embeddings, which become what the last layer leaves. Writes keys and values."""
        full = windowed = _angles(self.ropes.full, tokens.positions)
        if self.ropes.windowed is not None:
            windowed = _angles(self.ropes.windowed, tokens.positions)
        for index, layer in enumerate(self.layers):
            x.add_(self._attend(index, layer, x, full if layer.window is None else windowed, tokens))
            x.add_(self._feed(layer, x))

    def _attend(self, index: int, layer: Layer, x: torch.Tensor, angles: Angles, tokens: Tokens) -> torch.Tensor:
        config = self.config
        qkv = layer.qkv(layer.input_norm(x).to(self.dtype)).view(x.shape[0], -1, config.head_dim)
        turned = qkv[:, : config.heads + config.kv_heads]
        _rotate(turned, layer, angles)
        tokens.cache.write(index, tokens.slots, qkv[:, config.heads :])
        found = tokens.attention(index, layer.window, turned[:, : config.heads])
        output = layer.output(found.reshape(x.shape[0], -1))
        return output if layer.output_norm is None else layer.output_norm(output.float())

    def _feed(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(layer.mlp_norm(x).to(self.dtype)).chunk(2, dim=-1)
        gate = functional.silu(gate) if self.config.activation == "silu" else functional.gelu(gate, approximate="tanh")
        down = layer.down(gate.mul_(up))
        return down if layer.down_norm is None else layer.down_norm(down.float())


def _angles(table: torch.Tensor, positions: torch.Tensor) -> Angles:
    """Cosines and sines of these positions, each [tokens, 1, head_dim]."""
    cos, sin = table.index_select(0, positions).unsqueeze(1).unbind(2)
    return cos, sin


def _rotate(heads: torch.Tensor, layer: Layer, angles: Angles) -> None:
    """Norms (where the model does) and rotates queries and keys [tokens, heads, head_dim] in place."""
    cos, sin = angles
    x = heads.float() if layer.head_norm is None else layer.head_norm(heads.float())
    tokens, count, dim = x.shape
    swapped = x.view(tokens, count, 2, dim // 2).flip(2).view(tokens, count, dim)
    if heads.dtype == torch.float32:
        torch.addcmul(x * cos, swapped, sin, out=heads)
    else:
        heads.copy_(torch.addcmul(x * cos, swapped, sin))
