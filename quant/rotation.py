"""The rotation of queries and keys by their positions, as the quantizer's own forward pass does it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quant.checkpoint.angles import inverse_frequencies
from quant.checkpoint.rope import RopeConfig


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """cos, sin: float32 [positions, head_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, first: int, count: int) -> Rotation:
        return Rotation(self.cos[first : first + count], self.sin[first : first + count])

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """[..., positions, head_dim]; the two halves of a head are the pairs."""
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * self.cos - high * self.sin, high * self.cos + low * self.sin), dim=-1)


def rotation(rope: RopeConfig, positions: int, device: torch.device) -> Rotation:
    frequencies, gain = inverse_frequencies(rope)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies).to(device)
    return Rotation(angles.cos() * gain, angles.sin() * gain)
