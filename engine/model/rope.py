"""The tables of rotary angles that the model and the kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quant.checkpoint.angles import inverse_frequencies
from quant.checkpoint.config import ModelConfig
from quant.checkpoint.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class RopeTables:
    full: torch.Tensor
    windowed: torch.Tensor | None = None  # of layers with a window, where theirs differ


def rope_tables(config: ModelConfig, positions: int, device: torch.device) -> RopeTables:
    windowed = None if config.window_rope is None else rope_table(config.window_rope, positions, device)
    return RopeTables(rope_table(config.rope, positions, device), windowed)


def rope_table(config: RopeConfig, positions: int, device: torch.device) -> torch.Tensor:
    """[positions, 2, dim] float32: cosines, then sines negated in the first half.

    With x' = x with its halves swapped, the rotated head is x · cos + x' · sin.
    """
    frequencies, sharpness = inverse_frequencies(config)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * sharpness, angles.sin() * sharpness
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).to(device)
