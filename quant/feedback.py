"""Rounding with feedback: what a column loses is made up in the columns that are not rounded yet.

Scales and zero points stay as the search chose them; only which way each value is rounded changes. The error that
is kept small is that of the layer's output over the calibration tokens, so columns make up for one another as far
as their inputs go together. Columns with the largest inputs are rounded first, while most others can still help.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from quant.activations import Activations
from quant.checkpoint.forms import Int4Groups
from quant.checkpoint.nibbles import pack_nibbles
from quant.rounding import LEVELS
from quant.search import Ranges

_PANEL: Final = 128  # columns rounded before their losses are carried to the rest of the block at once


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Some inputs. order: of their elimination. carry: in that order, the upper factor U of the inverse of their
    products (inverse = Uᵀ U). Row j of U over its diagonal is how a loss in column j is best spread over the columns
    after it."""

    order: torch.Tensor
    carry: torch.Tensor


class Feedback:
    """Serves the linears that read one input. `activations` have all their tokens."""

    def __init__(self, activations: Activations) -> None:
        self._activations = activations
        self._blocks = [_eliminated(activations.damped(place)) for place in range(len(activations.blocks))]

    def round(self, weight: torch.Tensor, ranges: Ranges) -> Int4Groups:
        """Rounds a weight, float32 [N, K], column by column."""
        codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
        group = self._activations.group
        for block, solved in zip(self._activations.blocks, self._blocks, strict=True):
            columns = solved.order + int(block.start)
            groups = columns // group
            codes[:, columns] = _round_block(
                weight[:, columns], ranges.scale[:, groups], ranges.zero[:, groups], solved.carry
            )
        return Int4Groups(pack_nibbles(codes), ranges.scale.half(), ranges.zero.to(torch.uint8), group)


def _eliminated(damped: torch.Tensor) -> _Block:
    order = damped.diagonal().argsort(descending=True, stable=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped[order][:, order]))
    return _Block(order, torch.linalg.cholesky(inverse, upper=True).float())


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
