"""One decoder layer from float32 to few bits: fold scales, choose ranges, round, and report the loss."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from quant.activations import Activations
from quant.block import Block, BlockWeights, Observer
from quant.checkpoint.forms import Int4Groups, Int8Rows
from quant.checkpoint.rounding import round_rows
from quant.errors import CannotQuantize
from quant.feedback import Feedback
from quant.fold import Fold, fold_in, folds
from quant.rounding import round_groups
from quant.search import output_error, search_ranges, search_scale


@dataclass(frozen=True, slots=True)
class LinearLoss:
    """Relative errors (root mean square) of one linear's output: rounded to nearest, and as it was quantized."""

    name: str
    bits: int
    nearest: float
    error: float
    alpha: float
    clipped: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerResult:
    """dense: norms and biases, changed by folding. quantized: by linear name."""

    dense: BlockWeights
    quantized: Mapping[str, Int4Groups | Int8Rows]
    losses: tuple[LinearLoss, ...]

    def weights(self) -> BlockWeights:
        """The layer as it will be served, in float32."""
        linears = {f"{name}.weight": weight.dequantize(torch.float32) for name, weight in self.quantized.items()}
        return {**self.dense, **linears}


class LayerCalibration:
    """Gathers what the linears of one layer read, while calibration text runs through it. `eight`: the linears that are
    rounded to eight bits. weights: how much each token counts for each fold, [folds, S, T]; None: all the same."""

    def __init__(
        self,
        block: Block,
        group: int,
        eight: Collection[str],
        device: torch.device,
        weights: torch.Tensor | None = None,
    ) -> None:
        self._eight = eight
        self._weights = weights
        self._folds = folds(block.config)
        for fold in self._folds:
            if fold.inputs % group and not self._stays(fold):
                raise CannotQuantize(
                    f"{fold.linears[0]} has {fold.inputs} inputs, not whole groups of {group}: choose a smaller group"
                )
        self._seen = {
            fold.linears[0]: Activations(fold.inputs, 1 if self._stays(fold) else group, device) for fold in self._folds
        }

    def observing(self, rows: slice) -> Observer:
        """Returns what observes a pass of these sequences of the calibration text."""
        weights = {} if self._weights is None else dict(zip(self._seen, self._weights[:, rows], strict=True))

        def observe(linear: str, x: torch.Tensor, _: torch.Tensor) -> None:
            if linear in self._seen:
                self._seen[linear].add(x, weights.get(linear))

        return observe

    def quantize(self, weights: BlockWeights) -> LayerResult:
        """`weights` is left as it is."""
        changed = dict(weights)
        quantized: dict[str, Int4Groups | Int8Rows] = {}
        losses: list[LinearLoss] = []
        nearest = {name: self._nearest_error(fold, name, weights) for fold in self._folds for name in fold.linears}
        alphas = {fold.linears[0]: self._fold(fold, changed) for fold in self._folds}
        for fold in self._folds:
            seen = self._seen[fold.linears[0]]
            feedback = None if self._stays(fold) else Feedback(seen)
            for name in fold.linears:
                weight = changed.pop(f"{name}.weight")
                rounded, clipped = _rounded(weight, seen, feedback)
                quantized[name] = rounded
                error = _relative(rounded.dequantize(torch.float32) - weight, weight, seen)
                bits = 4 if feedback else 8
                losses.append(LinearLoss(name, bits, nearest[name], error, alphas[fold.linears[0]], clipped))
        return LayerResult(changed, quantized, tuple(losses))

    def _nearest_error(self, fold: Fold, name: str, weights: BlockWeights) -> float:
        weight, seen = weights[f"{name}.weight"], self._seen[fold.linears[0]]
        rounded = round_rows(weight) if self._stays(fold) else round_groups(weight, seen.group)
        return _relative(rounded.dequantize(torch.float32) - weight, weight, seen)

    def _fold(self, fold: Fold, weights: BlockWeights) -> float:
        if fold.before is None or self._stays(fold):
            return 0.0
        seen = self._seen[fold.linears[0]]
        choice = search_scale([weights[f"{name}.weight"] for name in fold.linears], fold, seen)
        if choice.alpha:
            fold_in(weights, fold, choice.scale)
            seen.divide(fold.to_inputs(choice.scale))
        return choice.alpha

    def _stays(self, fold: Fold) -> bool:
        return fold.linears[0] in self._eight


def _rounded(weight: torch.Tensor, seen: Activations, feedback: Feedback | None) -> tuple[Int4Groups | Int8Rows, float]:
    if feedback is None:
        return round_rows(weight), 0.0
    ranges = search_ranges(weight, seen)
    return feedback.refine(weight, feedback.round(weight, ranges)), ranges.clipped


def _relative(delta: torch.Tensor, weight: torch.Tensor, seen: Activations) -> float:
    return math.sqrt(output_error(delta, seen) / max(output_error(weight, seen), 1e-30))
