"""Root-mean-square norms against exact arithmetic."""

from __future__ import annotations

import torch

from engine.model.norm import RmsNorm


def test_norm_is_exact_whatever_the_scale() -> None:
    generator = torch.Generator().manual_seed(1)
    for scale in (0.0, 1e-6, 1.0, 1e4):
        for shape, weight in (((3, 256), (256,)), ((2, 6, 64), (6, 64))):
            x = torch.randn(shape, generator=generator) * scale
            gain = torch.rand(weight, generator=generator) + 0.5
            exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain.double()
            torch.testing.assert_close(RmsNorm(gain, 1e-6)(x).double(), exact, rtol=3e-6, atol=1e-9)
