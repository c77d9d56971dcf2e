"""One decoder layer in float32: the arithmetic that the quantizer measures itself against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from quant.checkpoint.config import ModelConfig
from quant.checkpoint.nibbles import in_groups
from quant.checkpoint.tensors import mlp_norm
from quant.rotation import Rotation

BlockWeights = dict[str, torch.Tensor]  # tensor names within the layer: "mlp.up_proj.weight", ...
Observer = Callable[[str, torch.Tensor], None]  # a linear's name and its input [..., K]


@dataclass(slots=True, eq=False)
class KeyValues:
    """Keys and values of one layer so far, each [S, kv_heads, T, head_dim]."""

    keys: torch.Tensor | None = field(default=None)
    values: torch.Tensor | None = field(default=None)

    @property
    def length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys = keys if self.keys is None else torch.cat((self.keys, keys), dim=2)
        self.values = values if self.values is None else torch.cat((self.values, values), dim=2)
        return self.keys, self.values


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A layer's shape and rotation; its weights are handed in, since the quantizer changes them."""

    config: ModelConfig
    window: int | None
    rotation: Rotation

    def forward(
        self, weights: BlockWeights, x: torch.Tensor, past: KeyValues | None = None, observe: Observer | None = None
    ) -> torch.Tensor:
        """x [S, T, hidden] -> the same shape."""
        mixed = self.attention(weights, self.norm(weights, "input_layernorm", x), past, observe)
        x = x + (self.norm(weights, "post_attention_layernorm", mixed) if self.config.output_norms else mixed)
        fed = self.mlp(weights, self.norm(weights, mlp_norm(self.config), x), observe)
        return x + (self.norm(weights, "post_feedforward_layernorm", fed) if self.config.output_norms else fed)

    def norm(self, weights: BlockWeights, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weights[f"{name}.weight"], self.config.norm_eps)

    def attention(
        self, weights: BlockWeights, h: torch.Tensor, past: KeyValues | None = None, observe: Observer | None = None
    ) -> torch.Tensor:
        """h: the normed input [S, T, hidden]."""
        config = self.config
        first = 0 if past is None else past.length
        rotation = self.rotation.at(first, h.shape[1])
        q = self._heads(weights, "q", h, config.heads, observe)
        k = self._heads(weights, "k", h, config.kv_heads, observe)
        v = self._heads(weights, "v", h, config.kv_heads, observe)
        if "self_attn.q_norm.weight" in weights:
            q, k = self.norm(weights, "self_attn.q_norm", q), self.norm(weights, "self_attn.k_norm", k)
        q, k = rotation.turn(q) * config.query_scale, rotation.turn(k)
        if past is not None:
            k, v = past.extend(k, v)
        share = config.heads // config.kv_heads
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(h.shape[1], first, h.device))
        return apply(weights, "self_attn.o_proj", mixed.transpose(1, 2).flatten(2), observe)

    def mlp(self, weights: BlockWeights, h: torch.Tensor, observe: Observer | None = None) -> torch.Tensor:
        gate = apply(weights, "mlp.gate_proj", h, observe)
        gate = functional.silu(gate) if self.config.activation == "silu" else functional.gelu(gate, approximate="tanh")
        return apply(weights, "mlp.down_proj", gate * apply(weights, "mlp.up_proj", h, observe), observe)

    def _heads(
        self, weights: BlockWeights, which: str, h: torch.Tensor, heads: int, observe: Observer | None
    ) -> torch.Tensor:
        """[S, T, hidden] -> [S, heads, T, head_dim]."""
        flat = apply(weights, f"self_attn.{which}_proj", h, observe)
        return in_groups(flat, flat.shape[2] // heads).transpose(1, 2)

    def _mask(self, count: int, first: int, device: torch.device) -> torch.Tensor:
        """bool [count, first + count]: what each new position may see."""
        positions = torch.arange(first + count, device=device)
        distance = positions[first:].unsqueeze(1) - positions
        seen = distance >= 0
        return seen if self.window is None else seen & (distance < self.window)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def apply(weights: BlockWeights, linear: str, x: torch.Tensor, observe: Observer | None = None) -> torch.Tensor:
    if observe is not None:
        observe(linear, x)
    return functional.linear(x, weights[f"{linear}.weight"], weights.get(f"{linear}.bias"))
