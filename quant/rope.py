"""Rotary positions: inverse frequencies under every scaling rule that the served families use, and the rotation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quant.errors import UnsupportedFormat


@dataclass(frozen=True, slots=True)
class RopeRule:
    """kind: default, linear, dynamic, llama3 or yarn. values: that rule's numbers, under the config's names."""

    kind: str
    theta: float
    values: Mapping[str, float]
    trained_positions: int  # before any scaling


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


def rotation(rule: RopeRule, head_dim: int, positions: int, device: torch.device) -> Rotation:
    frequencies, gain = _frequencies(rule, head_dim, positions)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies).to(device)
    return Rotation(angles.cos() * gain, angles.sin() * gain)


def _frequencies(rule: RopeRule, head_dim: int, positions: int) -> tuple[torch.Tensor, float]:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = rule.theta**-exponents
    factor = rule.values.get("factor", 1.0)
    if rule.kind == "default":
        return plain, 1.0
    if rule.kind == "linear":
        return plain / factor, 1.0
    if rule.kind == "dynamic":
        stretch = max(1.0, factor * positions / rule.trained_positions - (factor - 1))
        return (rule.theta * stretch ** (head_dim / (head_dim - 2))) ** -exponents, 1.0
    if rule.kind == "llama3":
        return _llama3(plain, rule, factor), 1.0
    if rule.kind == "yarn":
        return _yarn(plain, rule, factor, head_dim)
    raise UnsupportedFormat(f"rope scaling {rule.kind!r}", "use a model with default, linear, llama3 or yarn scaling")


def _llama3(plain: torch.Tensor, rule: RopeRule, factor: float) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between blended by how often they fit the old context."""
    low = rule.values.get("low_freq_factor", 1.0)
    high = rule.values.get("high_freq_factor", 4.0)
    turns = rule.trained_positions * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * keep + plain / factor * (1 - keep)


def _yarn(plain: torch.Tensor, rule: RopeRule, factor: float, head_dim: int) -> tuple[torch.Tensor, float]:
    def pair(turns: float) -> float:
        """The pair that makes this many turns over the trained positions."""
        wave = rule.trained_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(rule.theta))

    first, last = pair(rule.values.get("beta_fast", 32.0)), pair(rule.values.get("beta_slow", 1.0))
    if rule.values.get("truncate", 1.0):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    span = max(last - first, 0.001)
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / span).clamp(0, 1)
    frequencies = plain * (1 - stretch) + plain / factor * stretch
    return frequencies, _yarn_gain(rule, factor)


def _yarn_gain(rule: RopeRule, factor: float) -> float:
    def gain(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = rule.values.get("attention_factor")
    if given is not None:
        return given
    scale, all_dims = rule.values.get("mscale", 0.0), rule.values.get("mscale_all_dim", 0.0)
    return gain(scale) / gain(all_dims) if scale and all_dims else gain(1.0)
