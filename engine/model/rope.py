"""The table of rotary angles that the model and the kernels read."""

from __future__ import annotations

import torch

from quant.checkpoint.angles import inverse_frequencies
from quant.checkpoint.rope import RopeConfig


def rope_table(config: RopeConfig, positions: int, device: torch.device) -> torch.Tensor:
    """[positions, 2, dim] float32: cosines, then sines negated in the first half.

    With x' = x with its halves swapped, the rotated head is x · cos + x' · sin.
    """
    frequencies, sharpness = inverse_frequencies(config)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * sharpness, angles.sin() * sharpness
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).to(device)
