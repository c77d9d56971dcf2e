"""Rounding with feedback: what a column loses is made up in the columns that are not rounded yet.

Scales and zero points stay as the search chose them; only which way each value is rounded changes. The error that
is kept small is that of the layer's output over the calibration tokens, so columns make up for one another as far
as their inputs go together. Columns with the largest inputs are rounded first, while most others can still help.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from quant.activations import Activations
from quant.checkpoint.forms import Int4Groups
from quant.checkpoint.nibbles import pack_nibbles
from quant.errors import CannotQuantize
from quant.rounding import LEVELS
from quant.search import Ranges

_DAMPING: Final = 0.05  # of the mean diagonal: keeps rare inputs from moving weights far
_PANEL: Final = 128  # columns rounded before their losses are carried to the rest of the block at once


def round_with_feedback(weight: torch.Tensor, ranges: Ranges, activations: Activations) -> Int4Groups:
    """weight: float32 [N, K]."""
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for place, block in enumerate(activations.blocks):
        order, carry = _elimination(activations.products(place))
        columns = order + int(block.start)
        groups = columns // activations.group
        codes[:, columns] = _round_block(
            weight[:, columns], ranges.scale[:, groups], ranges.zero[:, groups], carry.to(weight.dtype)
        )
    return Int4Groups(pack_nibbles(codes), ranges.scale.half(), ranges.zero.to(torch.uint8), activations.group)


def _elimination(products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of a block's columns, and the upper factor U of the inverse products (inverse = Uᵀ U).

    Row j of U over its diagonal is how a loss in column j is best spread over the columns after it.
    """
    diagonal = products.diagonal()
    order = diagonal.argsort(descending=True, stable=True)
    mean = float(diagonal.mean())
    if not math.isfinite(mean):
        raise CannotQuantize("the calibration text drives a layer's inputs beyond float32: give another text")
    damped = products[order][:, order].double()
    damped.diagonal().add_(_DAMPING * mean if mean > 0 else 1.0)
    lower = torch.linalg.cholesky(damped)
    return order, torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)


def _round_block(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, carry: torch.Tensor) -> torch.Tensor:
    """All in elimination order: weight, scale, zero [N, B], carry [B, B] -> codes uint8 [N, B]. `weight` is used up.

    Works on transposed copies: a column's values then lie side by side.
    """
    left, steps, shifts = (matrix.T.contiguous() for matrix in (weight, scale, zero))
    codes = torch.empty_like(left, dtype=torch.uint8)
    for first in range(0, len(left), _PANEL):
        last = min(first + _PANEL, len(left))
        losses = torch.empty_like(left[first:last])
        for j in range(first, last):
            code = (left[j] / steps[j]).round_().add_(shifts[j]).clamp_(0, LEVELS)
            codes[j] = code
            loss = code.sub_(shifts[j]).mul_(steps[j]).sub_(left[j]).div_(-carry[j, j])
            losses[j - first] = loss
            left[j:last].addr_(carry[j, j:last], loss, alpha=-1)
        left[last:].addmm_(carry[first:last, last:].T, losses, alpha=-1)
    return codes.T
