"""Keys and values as kernels are given them: bfloat16, or the bytes of e4m3."""

from __future__ import annotations

import pytest
import torch

E4M3 = torch.float8_e4m3fn
KEPT = [pytest.param(torch.bfloat16, id="bf16"), pytest.param(E4M3, id="fp8")]


def as_kept(values: torch.Tensor, kept: torch.dtype) -> torch.Tensor:
    """As they lie in a page; NaN stays NaN."""
    return values.bfloat16() if kept == torch.bfloat16 else values.clamp(-448, 448).to(E4M3).view(torch.uint8)


def read(held: torch.Tensor) -> torch.Tensor:
    """What lies there, exactly, in bfloat16."""
    return held if held.dtype == torch.bfloat16 else held.view(E4M3).bfloat16()
