"""One decoder layer in float32: the arithmetic that the quantizer measures itself against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from quant.checkpoint.config import ModelConfig
from quant.checkpoint.nibbles import in_groups
from quant.checkpoint.tensors import LayerForm, Norm, layer_form
from quant.rotation import Rotation

BlockWeights = dict[str, torch.Tensor]  # tensor names within the layer: "mlp.up_proj.weight", ...
Observer = Callable[[str, torch.Tensor, torch.Tensor], None]  # a linear's name, input [..., K] and output [..., N]


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
        form = self.form
        mixed = self.attention(weights, self.norm(weights, form.input_norm, x), past, observe)
        x = x + self.norm(weights, form.output_norm, mixed)
        fed = self.mlp(weights, self.norm(weights, form.mlp_norm, x), observe)
        return x + self.norm(weights, form.down_norm, fed)

    @property
    def form(self) -> LayerForm:
        return layer_form(self.config)

    def norm(self, weights: BlockWeights, norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
        """Returns x as it is where the layer has no such norm."""
        return x if norm is None else rms_norm(x, weights[f"{norm.name}.weight"], self.config.norm_eps)

    def attention(
        self, weights: BlockWeights, h: torch.Tensor, past: KeyValues | None = None, observe: Observer | None = None
    ) -> torch.Tensor:
        """h: the normed input [S, T, hidden]."""
        config, form = self.config, self.form
        first = 0 if past is None else past.length
        rotation = self.rotation.at(first, h.shape[1])
        q, k, v = (
            self._heads(weights, norm, apply(weights, name, h, observe))
            for name, norm in zip(form.qkv.linears, (form.query_norm, form.key_norm, None), strict=True)
        )
        q, k = rotation.turn(q) * config.query_scale, rotation.turn(k)
        if past is not None:
            k, v = past.extend(k, v)
        share = config.heads // config.kv_heads
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(h.shape[1], first, h.device))
        return apply(weights, form.output.linears[0], mixed.transpose(1, 2).flatten(2), observe)

    def mlp(self, weights: BlockWeights, h: torch.Tensor, observe: Observer | None = None) -> torch.Tensor:
        form = self.form
        gate, up = (apply(weights, name, h, observe) for name in form.gate_up.linears)
        gate = functional.silu(gate) if self.config.activation == "silu" else functional.gelu(gate, approximate="tanh")
        return apply(weights, form.down.linears[0], gate * up, observe)

    def _heads(self, weights: BlockWeights, norm: Norm | None, flat: torch.Tensor) -> torch.Tensor:
        """[S, T, heads · head_dim] -> [S, heads, T, head_dim]."""
        if norm is not None:
            flat = self.norm(weights, norm, in_groups(flat, norm.size)).flatten(2)
        return in_groups(flat, self.config.head_dim).transpose(1, 2)

    def _mask(self, count: int, first: int, device: torch.device) -> torch.Tensor:
        """bool [count, first + count]: what each new position may see."""
        positions = torch.arange(first + count, device=device)
        distance = positions[first:].unsqueeze(1) - positions
        seen = distance >= 0
        return seen if self.window is None else seen & (distance < self.window)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def apply(weights: BlockWeights, linear: str, x: torch.Tensor, observe: Observer | None = None) -> torch.Tensor:
    made = functional.linear(x, weights[f"{linear}.weight"], weights.get(f"{linear}.bias"))
    if observe is not None:
        observe(linear, x, made)
    return made
