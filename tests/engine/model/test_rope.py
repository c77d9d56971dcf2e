"""The table of angles that the model and the kernels read."""

from __future__ import annotations

import math

import pytest
import torch

from engine.model.rope import rope_table
from quant.checkpoint.rope import LinearScaling, RopeConfig


def test_angles_turn_pairs_of_halves() -> None:
    config = RopeConfig(theta=100.0, dim=8, scaling=LinearScaling(factor=2.0))
    table = rope_table(config, 5, torch.device("cpu"))
    assert table.shape == (5, 2, 8)
    x = torch.randn(8, generator=torch.Generator().manual_seed(0))
    for position in range(5):
        cos, sin = table[position]
        turned = x * cos + torch.cat((x[4:], x[:4])) * sin
        for pair in range(4):
            angle = position * 100.0 ** (-2 * pair / 8) / 2.0
            low, high = float(x[pair]), float(x[pair + 4])
            assert float(turned[pair]) == pytest.approx(low * math.cos(angle) - high * math.sin(angle), abs=1e-5)
            assert float(turned[pair + 4]) == pytest.approx(high * math.cos(angle) + low * math.sin(angle), abs=1e-5)
