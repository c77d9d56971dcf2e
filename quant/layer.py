"""One decoder layer from float32 to four bits: fold scales, choose ranges, round, and report the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quant.activations import Activations
from quant.block import Block, BlockWeights
from quant.checkpoint.forms import Int4Groups
from quant.errors import CannotQuantize
from quant.feedback import round_with_feedback
from quant.fold import Fold, fold_in, folds
from quant.rounding import round_groups
from quant.search import output_error, search_ranges, search_scale


@dataclass(frozen=True, slots=True)
class LinearLoss:
    """Relative errors (root mean square) of one linear's output: rounded to nearest, and as it was quantized."""

    name: str
    nearest: float
    error: float
    alpha: float
    clipped: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerResult:
    """dense: norms and biases, changed by folding. quantized: by linear name."""

    dense: BlockWeights
    quantized: Mapping[str, Int4Groups]
    losses: tuple[LinearLoss, ...]

    def weights(self) -> BlockWeights:
        """The layer as it will be served, in float32."""
        linears = {f"{name}.weight": weight.dequantize(torch.float32) for name, weight in self.quantized.items()}
        return {**self.dense, **linears}


class LayerCalibration:
    """Gathers what the linears of one layer read, while calibration text runs through it."""

    def __init__(self, block: Block, group: int, device: torch.device) -> None:
        self._folds = folds(block.config)
        for fold in self._folds:
            if fold.inputs % group:
                raise CannotQuantize(
                    f"{fold.linears[0]} has {fold.inputs} inputs, not whole groups of {group}: choose a smaller group"
                )
        self._seen = {fold.linears[0]: Activations(fold.inputs, group, device) for fold in self._folds}

    def observe(self, linear: str, x: torch.Tensor) -> None:
        if linear in self._seen:
            self._seen[linear].add(x)

    def quantize(self, weights: BlockWeights) -> LayerResult:
        """`weights` is left as it is."""
        changed = dict(weights)
        quantized: dict[str, Int4Groups] = {}
        losses: list[LinearLoss] = []
        nearest = {name: self._nearest_error(fold, name, weights) for fold in self._folds for name in fold.linears}
        alphas = {fold.linears[0]: self._fold(fold, changed) for fold in self._folds}
        for fold in self._folds:
            seen = self._seen[fold.linears[0]]
            for name in fold.linears:
                weight = changed.pop(f"{name}.weight")
                ranges = search_ranges(weight, seen)
                quantized[name] = round_with_feedback(weight, ranges, seen)
                error = _relative(quantized[name].dequantize(torch.float32) - weight, weight, seen)
                losses.append(LinearLoss(name, nearest[name], error, alphas[fold.linears[0]], ranges.clipped))
        return LayerResult(changed, quantized, tuple(losses))

    def _nearest_error(self, fold: Fold, name: str, weights: BlockWeights) -> float:
        weight, seen = weights[f"{name}.weight"], self._seen[fold.linears[0]]
        return _relative(round_groups(weight, seen.group).dequantize(torch.float32) - weight, weight, seen)

    def _fold(self, fold: Fold, weights: BlockWeights) -> float:
        seen = self._seen[fold.linears[0]]
        choice = search_scale([weights[f"{name}.weight"] for name in fold.linears], fold, seen)
        if choice.alpha:
            fold_in(weights, fold, choice.scale)
            seen.divide(fold.to_inputs(choice.scale))
        return choice.alpha


def _relative(delta: torch.Tensor, weight: torch.Tensor, seen: Activations) -> float:
    return math.sqrt(output_error(delta, seen) / max(output_error(weight, seen), 1e-30))
