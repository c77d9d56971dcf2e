"""The two searches of activation-aware quantization: a scale for each input channel, a range for each group.

Both minimise the same error: that of the layer's output over the calibration tokens, group by group, which is
tr(D P Dᵀ) with D what rounding changes in a group's weights and P the mean products of the group's inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from quant.activations import Activations
from quant.checkpoint.nibbles import in_groups
from quant.fold import Fold
from quant.rounding import LEVELS, affine

_STEPS: Final = 20
_SHRINKS: Final = tuple(1 - 0.05 * step for step in range(9))  # of a group's range: 1 is none, 0.6 the smallest
_ROWS_AT_ONCE: Final = 512


@dataclass(frozen=True, slots=True, eq=False)
class ScaleChoice:
    """scale [channels] = magnitude ** alpha. Alpha 0 leaves the layer as it is, and is always among the candidates."""

    alpha: float
    scale: torch.Tensor
    error: float


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """scale, zero: float32 [N, K/g]. clipped: the share of groups whose range was cut."""

    scale: torch.Tensor
    zero: torch.Tensor
    clipped: float


def search_scale(weights: Sequence[torch.Tensor], fold: Fold, activations: Activations) -> ScaleChoice:
    """The power of the inputs' magnitude that loses least when the linears of `fold` are rounded to nearest."""
    products = activations.group_products()

    def error(scale: torch.Tensor) -> float:
        columns = fold.to_inputs(scale)
        return sum(_rounding_error(weight, columns, products) for weight in weights)

    choices = [
        ScaleChoice(alpha, scale, error(scale))
        for alpha, scale in _candidates(fold.to_channels(activations.magnitude()))
    ]
    return min(choices, key=lambda choice: choice.error)  # of equals the first: the smallest alpha


def search_ranges(weight: torch.Tensor, activations: Activations) -> Ranges:
    """Returns for each group the cut of its range that loses least; no cut is among them."""
    products = activations.group_products()
    found = [_ranges(weight[rows], products) for rows in _chunks(weight.shape[0])]
    clipped = sum(int(cut.sum()) for _, _, cut in found)
    scale, zero = torch.cat([scale for scale, _, _ in found]), torch.cat([zero for _, zero, _ in found])
    return Ranges(scale, zero, clipped / scale.numel())


def output_error(delta: torch.Tensor, activations: Activations) -> float:
    """Mean squared change of the output that a change of the weights [N, K] makes, over blocks of inputs."""
    total = 0.0
    for place, block in enumerate(activations.blocks):
        part = delta[:, block]
        total += float(((part @ activations.products(place)) * part).sum())
    return total


def _candidates(magnitude: torch.Tensor) -> Iterator[tuple[float, torch.Tensor]]:
    floor = max(float(magnitude.max()) * 1e-4, 1e-8)
    for step in range(_STEPS + 1):
        alpha = step / _STEPS
        scale = magnitude.clamp(min=floor) ** alpha
        yield alpha, scale / (scale.max() * scale.min()).sqrt()


def _rounding_error(weight: torch.Tensor, columns: torch.Tensor, products: torch.Tensor) -> float:
    group = products.shape[1]
    total = 0.0
    for rows in _chunks(weight.shape[0]):
        grouped = in_groups(weight[rows] * columns, group)
        scale, zero = affine(grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0))
        delta = _rounded(grouped, scale, zero).sub_(grouped) / in_groups(columns, group)
        total += float(_errors(delta, products).sum())
    return total


def _ranges(weight: torch.Tensor, products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grouped = in_groups(weight, products.shape[1])
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scale, zero = affine(low, high)
    error = _errors(_rounded(grouped, scale, zero).sub_(grouped), products)
    cut = torch.zeros_like(error, dtype=torch.bool)
    for shrink in _SHRINKS[1:]:
        tried_scale, tried_zero = affine(low * shrink, high * shrink)
        tried = _errors(_rounded(grouped, tried_scale, tried_zero).sub_(grouped), products)
        better = tried < error
        error = torch.where(better, tried, error)
        scale, zero = torch.where(better, tried_scale, scale), torch.where(better, tried_zero, zero)
        cut |= better
    return scale, zero, cut


def _rounded(grouped: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Rounds [N, K/g, g] to four bits."""
    step, shift = scale.unsqueeze(2), zero.unsqueeze(2)
    return (grouped / step).round_().add_(shift).clamp_(0, LEVELS).sub_(shift).mul_(step)


def _errors(delta: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """[N, K/g, g] and [K/g, g, g] -> [N, K/g]."""
    turned = delta.transpose(0, 1)  # [K/g, N, g]
    return (torch.bmm(turned, products) * turned).sum(2).T


def _chunks(rows: int) -> Iterator[slice]:
    for first in range(0, rows, _ROWS_AT_ONCE):
        yield slice(first, first + _ROWS_AT_ONCE)
