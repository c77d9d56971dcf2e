"""Measures how much the answers of a model change when a part of it is rounded to four bits, and chooses the parts that
stay in eight.

The divergence from the model's own next-token distribution grows with the square of what rounding changes. Its second
derivative is the mean square of the gradient of a sampled continuation's likelihood, so one pass backward over a little
text gives the loss of every part: half the sum, over its weights, of squared gradient times squared change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from quant.checkpoint.config import ModelConfig
from quant.checkpoint.rounding import round_rows
from quant.checkpoint.tensors import layer_linears
from quant.decoder import Decoder
from quant.errors import CannotQuantize
from quant.fold import folds
from quant.rounding import round_groups

_SEQUENCES: Final = 8
_LENGTH: Final = 256  # tokens of each
_GROUP_BITS: Final = 16 + 4  # a group's scale and zero point
_ROW_BITS: Final = 16  # a row's scale

Done = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Linears of one layer that read one input, and so share a format. four: loss in nats a token, by group; a group
    that does not divide the inputs is not there. eight: the same in eight bits."""

    layer: int
    linears: tuple[str, ...]
    inputs: int
    weights: int
    four: Mapping[int, float]
    eight: float

    def bits(self, group: int | None) -> float:
        """Counts the bits of all its weights with their scales. None as the group stands for eight bits."""
        return self.weights * (8 + _ROW_BITS / self.inputs if group is None else 4 + _GROUP_BITS / group)


@dataclass(frozen=True, slots=True)
class BitPlan:
    """group: of the parts in four bits. eight: the layers' linears that stay in eight, by layer. bits: a weight."""

    group: int
    eight: Mapping[int, tuple[str, ...]]
    bits: float

    @property
    def mixed(self) -> bool:
        return bool(self.eight)


def least_bits(config: ModelConfig, groups: Iterable[int]) -> float:
    """Bits a weight where everything that a group divides has four, with the best of the groups."""
    shapes = layer_linears(config)
    sizes = [(fold.inputs, sum(math.prod(shapes[name]) for name in fold.linears)) for fold in folds(config)]
    parts = [LayerPart(0, (), inputs, weights, {}, 0.0) for inputs, weights in sizes]
    spent = [sum(part.bits(None if part.inputs % group else group) for part in parts) for group in groups]
    return min(spent) / sum(part.weights for part in parts)


def uniform(group: int) -> BitPlan:
    return BitPlan(group, {}, 4 + _GROUP_BITS / group)


def plan(parts: Sequence[LayerPart], budget: float, groups: Iterable[int]) -> BitPlan:
    """The smallest of the groups that fits into `budget` bits a weight, and the parts that then have eight.
    Raises CannotQuantize."""
    weights = sum(part.weights for part in parts)
    found = [_within(parts, budget * weights, group) for group in groups]
    fitting = [(group, spent, eight) for spent, group, eight in found if spent <= budget * weights]
    if not fitting:
        least = min(spent for spent, _, _ in found) / weights
        raise CannotQuantize(f"a budget of {budget:g} bits a weight: this model takes {least:.2f} at least")
    group, spent, eight = min(fitting, key=lambda one: one[0])
    by_layer: dict[int, tuple[str, ...]] = {}
    for part in sorted(eight, key=lambda part: part.layer):
        by_layer[part.layer] = (*by_layer.get(part.layer, ()), *part.linears)
    return BitPlan(group, by_layer, spent / weights)


def _within(parts: Sequence[LayerPart], budget: float, group: int) -> tuple[float, int, list[LayerPart]]:
    """The bits with this group, and the parts in eight bits: those first that gain most for their bits."""
    eight = [part for part in parts if group not in part.four]
    spent = sum(part.bits(None if group not in part.four else group) for part in parts)

    def worth(part: LayerPart) -> float:
        return (part.four[group] - part.eight) / part.weights

    for part in sorted((part for part in parts if group in part.four), key=worth, reverse=True):
        more = part.bits(None) - part.bits(group)
        if worth(part) > 0 and spent + more <= budget:
            spent += more
            eight.append(part)
    return spent, group, eight


def measure(decoder: Decoder, windows: torch.Tensor, groups: Sequence[int], done: Done) -> tuple[LayerPart, ...]:
    """windows: int [S, T], of which a few are read. `done` gets the layers that are done, of how many."""
    ids = windows[:: max(1, len(windows) // _SEQUENCES)][:_SEQUENCES, :_LENGTH].long()
    with torch.inference_mode(False), torch.no_grad():
        inputs, x = [], decoder.embed(ids)
        for index in range(decoder.config.layers):
            inputs.append(x)
            x = decoder.block(index, ids.shape[1]).forward(decoder.layer(index), x)
        gradients = _of_answers(decoder, x)
        parts: list[LayerPart] = []
        for index in reversed(range(decoder.config.layers)):
            parts += _layer(decoder, index, inputs.pop(), gradients, groups)
            done(decoder.config.layers - index, decoder.config.layers)
    return tuple(reversed(parts))


def _of_answers(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
    """Gradients of the last layer's output, for continuations that the model itself draws. [S, T, hidden]."""
    random = torch.Generator().manual_seed(0)
    gradients = torch.empty_like(hidden)
    for row, x in enumerate(hidden):
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            logits = decoder.logits(decoder.finish(x))
            chances = logits.detach().cpu().softmax(1)
            drawn = torch.multinomial(chances, 1, generator=random).squeeze(1).to(logits.device)
            loss = functional.cross_entropy(logits, drawn, reduction="sum")
            (gradients[row],) = torch.autograd.grad(loss, x)
    return gradients


def _layer(
    decoder: Decoder, index: int, inputs: torch.Tensor, gradients: torch.Tensor, groups: Sequence[int]
) -> list[LayerPart]:
    """The parts of one layer, last first. `gradients` become those of its input."""
    block = decoder.block(index, inputs.shape[1])
    weights = {name: tensor.clone() for name, tensor in decoder.layer(index).items()}
    names = [f"{name}.weight" for name in layer_linears(decoder.config)]
    squares = {name: torch.zeros_like(weights[name]) for name in names}
    for row in range(len(inputs)):
        with torch.enable_grad():
            leaves = {name: weights[name].detach().requires_grad_() for name in names}
            x = inputs[row : row + 1].detach().clone().requires_grad_()
            out = block.forward({**weights, **leaves}, x)
            found = torch.autograd.grad(out, [x, *leaves.values()], gradients[row : row + 1])
        gradients[row] = found[0][0]
        for name, gradient in zip(names, found[1:], strict=True):
            squares[name].addcmul_(gradient, gradient)
    parts = []
    for fold in reversed(folds(decoder.config)):
        fitting = [group for group in groups if fold.inputs % group == 0]
        pairs = [(weights[f"{name}.weight"], squares[f"{name}.weight"]) for name in fold.linears]
        four = {g: sum(_loss(w, round_groups(w, g).dequantize(w.dtype), s) for w, s in pairs) for g in fitting}
        eight = sum(_loss(w, round_rows(w).dequantize(w.dtype), s) for w, s in pairs)
        scale = 2 * inputs.shape[0] * inputs.shape[1]
        size = sum(w.numel() for w, _ in pairs)
        lost = {group: loss / scale for group, loss in four.items()}
        parts.append(LayerPart(index, fold.linears, fold.inputs, size, lost, eight / scale))
    return parts


def _loss(weight: torch.Tensor, rounded: torch.Tensor, squares: torch.Tensor) -> float:
    return float((rounded.sub_(weight).square_() * squares).sum())
