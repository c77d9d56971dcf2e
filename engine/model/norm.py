"""Root-mean-square normalisation over the last dimension, in float32."""

from __future__ import annotations

import math

import torch
from torch.nn import functional


class RmsNorm:
    """y = x / sqrt(mean(x²) + eps) · weight; weight [width], or [heads, width] for heads side by side."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight  # float32
        self.eps = eps
        if weight.device.type != "cpu":
            return
        width = weight.shape[-1]
        # x / sqrt(mean(x²) + eps) = sqrt(width) · x / hypot(|x|, sqrt(width · eps)): four kernels on a CPU, where
        # torch's own takes as long as a small matrix product.
        self._scaled = weight * math.sqrt(width)
        self._floor = torch.tensor(math.sqrt(width * eps), dtype=torch.float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x float32 [..., *weight.shape]; the result is new."""
        if x.is_cuda:
            return functional.rms_norm(x, x.shape[-1:], None, self.eps).mul_(self.weight)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.div(x, torch.hypot(length, self._floor)).mul_(self._scaled)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class WideNorm(RmsNorm):
    """Norms all heads of queries as one, and all of keys; weight [heads + kv_heads, dim]."""

    def __init__(self, weight: torch.Tensor, eps: float, heads: int) -> None:
        super().__init__(weight, eps)
        self._parts = RmsNorm(weight[:heads].flatten(), eps), RmsNorm(weight[heads:].flatten(), eps)
        self.heads = heads

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x float32 [tokens, heads + kv_heads, dim]; the result is new."""
        halves = x[:, : self.heads], x[:, self.heads :]
        found = (norm(half.flatten(1)).view(half.shape) for norm, half in zip(self._parts, halves, strict=True))
        return torch.cat(tuple(found), 1)


class NoNorm(RmsNorm):
    """Stands where a family has no norm, and returns its input."""

    def __init__(self) -> None:
        super().__init__(torch.empty(0), 0.0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x
