"""Qwen3 as it is trained: float32 parameters under Hugging Face's names, no cache, a tied head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.train.tokenizer import MAX_POSITIONS, VOCABULARY


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 64
    vocabulary: int = VOCABULARY
    max_positions: int = MAX_POSITIONS
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6


SHAPES = {
    "demo": Shape(hidden=256, layers=6, heads=4, kv_heads=2, intermediate=768),
    "demo-draft": Shape(hidden=128, layers=2, heads=2, kv_heads=1, intermediate=384),
}


def rotary(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [length, head_dim], halves repeated as Qwen3 rotates them."""
    inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim)
    angles = torch.outer(torch.arange(length, device=device).float(), inverse).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-high, low), dim=-1) * sines


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = (batch, length, -1, self._head_dim)
        v = self.v_proj(x).view(split).transpose(1, 2)
        q = self.q_norm(self.q_proj(x).view(split).float()).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(split).float()).transpose(1, 2)
        q, k = rotate(q, cosines, sines).to(v.dtype), rotate(k, cosines, sines).to(v.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self._dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        x = x + self._dropout(self.self_attn(self.input_layernorm(x), cosines, sines))
        x = x + self._dropout(self.mlp(self.post_attention_layernorm(x)))
        return x


class Decoder(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self._shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self._dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        cosines, sines = rotary(self._shape, ids.shape[1], ids.device)
        x = self._dropout(self.embed_tokens(ids))
        for layer in self.layers:
            x = layer(x, cosines, sines)
        out: Tensor = self.norm(x)
        return out


class Qwen3(nn.Module):
    """ids [batch, length] → logits [batch, length, vocabulary]."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape, dropout)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.model(ids), self.model.embed_tokens.weight)
