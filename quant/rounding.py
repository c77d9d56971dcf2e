"""Round to nearest: a float weight to Int4Groups, without looking at activations."""

from __future__ import annotations

from typing import Final

import torch

from quant.checkpoint.errors import NotFinite
from quant.checkpoint.forms import Int4Groups
from quant.checkpoint.nibbles import in_groups, pack_nibbles
from quant.errors import CannotQuantize

LEVELS: Final = 15  # four bits: 0..15
_SMALLEST: Final = 2.0**-24  # float16's smallest step; a scale of zero would divide by zero
_LARGEST: Final = 65504.0  # float16's largest number
_ROWS_AT_ONCE: Final = 128  # bounds the float32 copies


def round_groups(weight: torch.Tensor, group: int) -> Int4Groups:
    """[N, K] float -> four bits with a float16 scale and a zero point every `group` inputs."""
    if weight.shape[1] % group:
        raise CannotQuantize(f"{weight.shape[1]} inputs are not whole groups of {group}: choose a group that divides")
    grouped = in_groups(weight.float(), group)
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    return encode_groups(weight, *affine(low, high), group)


def affine(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale (float32 holding float16 numbers) and zero point (float32 holding 0..15) for ranges low <= 0 <= high."""
    if not bool(torch.isfinite(high - low).all()):
        raise NotFinite
    scale = ((high - low) / LEVELS).clamp(_SMALLEST, _LARGEST).half().float()
    zero = (-low / scale).round_().clamp_(0, LEVELS)
    return scale, zero


def encode_groups(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group: int) -> Int4Groups:
    """The nearest four-bit values under given scales and zero points, both [N, K/group]."""
    packed = torch.empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8, device=weight.device)
    for first in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        grouped = in_groups(weight[rows].float(), group) / scale[rows].unsqueeze(2)
        grouped.round_().add_(zero[rows].unsqueeze(2)).clamp_(0, LEVELS)
        packed[rows] = pack_nibbles(grouped.to(torch.uint8).flatten(1))
    return Int4Groups(packed, scale.half(), zero.to(torch.uint8), group)
