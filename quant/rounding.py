"""Round to nearest: a float weight to Int4Groups or Int8Rows, without looking at activations."""

from __future__ import annotations

from typing import Final

import torch

from quant.errors import CannotQuantize
from quant.nibbles import in_groups, pack_nibbles
from quant.weights import Int4Groups, Int8Rows

LEVELS: Final = 15  # four bits: 0..15
_SMALLEST: Final = 2.0**-24  # float16's smallest step; a scale of zero would divide by zero
_LARGEST: Final = 65504.0  # float16's largest number
_ROWS_AT_ONCE: Final = 128  # bounds the float32 copies


def round_rows(weight: torch.Tensor) -> Int8Rows:
    """[N, K] float -> eight bits with one symmetric scale a row.

    Scales are bfloat16 numbers, rounded up, so that a kernel that takes its scales in bfloat16 loses nothing.
    """
    q = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for first in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        block = weight[rows].float()
        scale[rows] = step = _bfloat16_up((_largest(block) / 127).clamp(min=2.0**-100))
        q[rows] = (block / step.unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8)
    return Int8Rows(q, scale)


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
        raise CannotQuantize("a weight holds NaN or infinity: the source checkpoint is damaged")
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


def _largest(block: torch.Tensor) -> torch.Tensor:
    largest = block.abs().amax(1)
    if not bool(torch.isfinite(largest).all()):
        raise CannotQuantize("a weight holds NaN or infinity: the source checkpoint is damaged")
    return largest


def _bfloat16_up(positive: torch.Tensor) -> torch.Tensor:
    """The smallest bfloat16 numbers that are not below: the low half of the bits is dropped after a carry."""
    return ((positive.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
