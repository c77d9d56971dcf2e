"""The frequencies of a rotary embedding under each published scaling.

Computed in float32 and in the order that the models were trained with: angles of late positions feel each rounding.
"""

from __future__ import annotations

import math

import torch

from quant.checkpoint.rope import DynamicScaling, LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


def inverse_frequencies(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """[dim / 2] radians a position, and the factor on cosines and sines."""
    steps = torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim
    plain = 1.0 / (config.theta**steps)
    match config.scaling:
        case None | DynamicScaling():
            return plain, config.gain
        case LinearScaling(factor=factor):
            return plain / factor, config.gain
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling), config.gain
        case YarnScaling() as scaling:
            return _yarn(config.theta**steps, config, scaling), _yarn_sharpness(scaling) * config.gain


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Frequencies of more than high_freq_factor turns in the original context stay, those below low_freq_factor are
    divided by the factor, and between the two it is a ramp.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    turns = scaling.original_context / wavelength
    keep = (turns - low) / (high - low)
    blended = (1 - keep) * plain / scaling.factor + keep * plain
    slow = wavelength > scaling.original_context / low
    fast = wavelength < scaling.original_context / high
    return torch.where(slow, plain / scaling.factor, torch.where(fast, plain, blended))


def _yarn(wavelengths: torch.Tensor, config: RopeConfig, scaling: YarnScaling) -> torch.Tensor:
    """A linear ramp over dimensions from extrapolated (fast) to interpolated (slow)."""

    def dimension_of(turns: float) -> float:
        span = math.log(scaling.original_context / (turns * 2 * math.pi))
        return config.dim * span / (2 * math.log(config.theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_sharpness(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
