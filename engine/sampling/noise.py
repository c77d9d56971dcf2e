"""Defines the noise behind every draw: a function of (seed, position, token id) alone, so that a seeded request repeats
exactly whatever runs beside it. All decoders share it; integers wrap at 64 bits.

    key  = mix(seed + GOLDEN)
    bits = mix(key + position · GOLDEN + id · ODD)
    u    = ((bits >> 40) + ½) / 2²⁴
    g    = -log(-log(u))
"""

from __future__ import annotations

import torch

GOLDEN = 0x9E3779B97F4A7C15
ODD = 0xD1B54A32D192ED03
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def seed_key(seed: int) -> int:
    """The 64-bit key of a request, signed as torch holds it."""
    z = (seed + GOLDEN) & _WORD
    z = ((z ^ (z >> 30)) * _FIRST) & _WORD
    z = ((z ^ (z >> 27)) * _SECOND) & _WORD
    return signed(z ^ (z >> 31))


def signed(word: int) -> int:
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def gumbel(keys: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """keys, positions int64 [rows]; ids int64 [rows or 1, n] → float64 [rows, n], exact near both ends of u."""
    z = (keys + positions * signed(GOLDEN)).unsqueeze(1) + ids * signed(ODD)
    z = (z ^ _shift(z, 30)) * signed(_FIRST)
    z = (z ^ _shift(z, 27)) * signed(_SECOND)
    z = z ^ _shift(z, 31)
    u = _shift(z, 40).to(torch.float64).add_(0.5).mul_(2.0**-24)
    return u.log_().neg_().log_().neg_()


def _shift(z: torch.Tensor, by: int) -> torch.Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)
