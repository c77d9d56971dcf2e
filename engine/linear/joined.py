"""Projections of one input whose weights differ in form, such as where one was left unquantized."""

from __future__ import annotations

import torch

from engine.linear import Linear


class JoinedLinear:
    def __init__(self, parts: tuple[Linear, ...]) -> None:
        self.parts = parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)
