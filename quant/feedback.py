"""Rounding with feedback: what a column loses is made up in the columns that are not rounded yet.

While columns are rounded, scales and zero points stay as the search chose them; only which way each value is rounded
changes. The error that is kept small is that of the layer's output over the calibration tokens, so columns make up for
one another as far as their inputs go together. Columns with the largest inputs are rounded first, while most others can
still help. The first of them knew nothing of the last, so all are then looked at once more, with what the others lost,
and each group's scale is fitted to its values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from quant.activations import Activations
from quant.checkpoint.forms import Int4Groups
from quant.checkpoint.nibbles import in_groups, pack_nibbles, unpack_nibbles
from quant.rounding import LEVELS
from quant.search import Ranges

_FURTHEST: Final = 0.3  # that a scale is moved, of itself: a group of few values could send it anywhere
_PANEL: Final = 128  # columns rounded before their losses are carried to the rest of the block at once


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Some inputs. products: damped. order: of their elimination. carry: in that order, the upper factor U of the
    inverse of their products (inverse = Uᵀ U). Row j of U over its diagonal is how a loss in column j is best spread
    over the columns after it."""

    products: torch.Tensor
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

    def refine(self, weight: torch.Tensor, rounded: Int4Groups) -> Int4Groups:
        """Rounds every value of `rounded` anew, each where the output errs least while all others stay, and fits each
        scale likewise, a group at a time. weight: float32 [N, K]."""
        codes, scale = unpack_nibbles(rounded.packed).float(), rounded.scale.float()
        zero, group = rounded.zero.float(), rounded.group
        for block, solved in zip(self._activations.blocks, self._blocks, strict=True):
            groups = slice(int(block.start) // group, -(-int(block.stop) // group))
            moved = _refine_block(weight[:, block], codes[:, block], scale[:, groups], zero[:, groups], solved.products)
            codes[:, block], scale[:, groups] = moved
        return Int4Groups(pack_nibbles(codes.to(torch.uint8)), scale.half(), rounded.zero, group)


def _eliminated(damped: torch.Tensor) -> _Block:
    order = damped.diagonal().argsort(descending=True, stable=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped[order][:, order]))
    return _Block(damped.float(), order, torch.linalg.cholesky(inverse, upper=True).float())


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


def _refine_block(
    weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, products: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """weight, codes [N, B], scale, zero [N, G], products [B, B] -> codes and scale.

    `slope` is half the derivative of the output's error by each value. Works on transposed copies, as above.
    """
    group = weight.shape[1] // scale.shape[1]
    signed = (in_groups(codes, group) - zero.unsqueeze(2)).flatten(1).T.contiguous()  # [B, N]
    steps, shifts = scale.T.contiguous(), zero.T.contiguous()  # [G, N]
    slope = products @ (signed * steps.repeat_interleave(group, 0) - weight.T)
    for place in range(len(steps)):
        own = slice(place * group, (place + 1) * group)
        before = signed[own] * steps[place]
        near = slope[own].clone()
        _round_again(signed[own], steps[place], shifts[place], near, products[own, own])
        steps[place] = _fitted(signed[own], steps[place], near, products[own, own])
        slope.addmm_(products[:, own], signed[own] * steps[place] - before)
    return (in_groups(signed.T, group) + zero.unsqueeze(2)).flatten(1), steps.T


def _round_again(
    signed: torch.Tensor, step: torch.Tensor, shift: torch.Tensor, slope: torch.Tensor, products: torch.Tensor
) -> None:
    """Changes one group's values [g, N] and their slope in place."""
    for j in range(len(signed)):
        best = signed[j] - slope[j] / (products[j, j] * step)
        code = best.round_().add_(shift).clamp_(0, LEVELS).sub_(shift)
        slope.addr_(products[:, j], (code - signed[j]) * step)
        signed[j] = code


def _fitted(signed: torch.Tensor, step: torch.Tensor, slope: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """The scale [N] of one group with which the output errs least, as float16 holds it."""
    curve = ((products @ signed) * signed).sum(0)
    moved = (step - (signed * slope).sum(0) / curve).half().float()
    near = (moved > 0) & ((moved / step - 1).abs() < _FURTHEST)  # false for NaN, where all values are the zero point
    return torch.where(near, moved, step)
