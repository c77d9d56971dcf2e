"""Round to nearest, one symmetric scale a row: what makes eight bits of a float weight."""

from __future__ import annotations

from typing import Final

import torch

from quant.checkpoint.errors import NotFinite
from quant.checkpoint.forms import Int8Rows

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


def _largest(block: torch.Tensor) -> torch.Tensor:
    largest = block.abs().amax(1)
    if not bool(torch.isfinite(largest).all()):
        raise NotFinite
    return largest


def _bfloat16_up(positive: torch.Tensor) -> torch.Tensor:
    """The smallest bfloat16 numbers that are not below: the low half of the bits is dropped after a carry."""
    return ((positive.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
