"""Measures how much the answers of a model change when its linears do: which tokens of the calibration text count for a
linear, and what a part loses that is rounded to four bits, so that the parts that lose most stay in eight.

The divergence from the model's own next-token distribution grows with the square of what rounding changes. Its second
derivative is the mean square of the gradient of a sampled continuation's likelihood, so one pass backward over the text
tells both. A change of a linear's output at one token counts as much as the gradient there is long. A part loses half
the mean square, over tokens, of that gradient times what rounding changes in the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from quant.block import BlockWeights
from quant.checkpoint.config import ModelConfig
from quant.checkpoint.errors import NotFinite
from quant.checkpoint.rounding import round_rows
from quant.checkpoint.tensors import layer_linears
from quant.decoder import Decoder
from quant.errors import CannotQuantize
from quant.fold import Fold, folds
from quant.rounding import round_groups

_AT_ONCE: Final = 2048  # tokens: bounds what every layer reads, and what losses are measured on
_PRECISION: Final = "medium"  # of products: bfloat16 where the processor has units for it, which are quicker
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


@dataclass(frozen=True, slots=True, eq=False)
class Sensitivity:
    """parts: what they lose, where groups were asked for. weights: how much each token counts for the linears of each
    fold, float32 [layers, folds, S, T], 1 in the mean over S and T."""

    parts: tuple[LayerPart, ...]
    weights: torch.Tensor


def measure(decoder: Decoder, windows: torch.Tensor, groups: Sequence[int], done: Done) -> Sensitivity:
    """windows: int [S, T]. `done` gets the steps that are done, of how many. Losses are measured on the first of some
    parts of the windows, each spread over all of them."""
    layers, kinds = decoder.config.layers, len(folds(decoder.config))
    parts: list[LayerPart] = []
    random = torch.Generator().manual_seed(0)
    turns = -(-windows.numel() // max(_AT_ONCE, windows.shape[1]))
    with torch.inference_mode(False), torch.no_grad(), _products(_PRECISION):
        weights = torch.empty(layers, kinds, *windows.shape)
        for turn in range(turns):
            inputs, x = [], decoder.embed(windows[turn::turns].long())
            for index in range(layers):
                inputs.append(x)
                x = decoder.block(index, windows.shape[1]).forward(decoder.layer(index), x)
            _check_finite(decoder, x)
            gradients = _of_answers(decoder, x, random)
            for index in reversed(range(layers)):
                seen = _backward(decoder, index, inputs.pop(), gradients)
                weights[index, :, turn::turns] = torch.stack([one.lengths() for one in seen]).cpu()
                if turn == 0 and groups:
                    parts += [_part(decoder, index, one, groups) for one in reversed(seen)]
                gradients = seen[0].before
                done(turn * layers + layers - index, turns * layers)
    mean = weights.mean((2, 3), keepdim=True)
    return Sensitivity(tuple(reversed(parts)), torch.where(mean > 0, weights / mean, 1.0))


@contextmanager
def _products(precision: str) -> Iterator[None]:
    """Sets the precision of float32 products, for the whole process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _check_finite(decoder: Decoder, hidden: torch.Tensor) -> None:
    if bool(torch.isfinite(hidden).all()):
        return
    for index in range(decoder.config.layers):
        if not all(bool(torch.isfinite(tensor).all()) for tensor in decoder.layer(index).values()):
            raise NotFinite
    raise CannotQuantize("the calibration text drives a layer's inputs beyond float32: give another text")


def _of_answers(decoder: Decoder, hidden: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Gradients of the last layer's output, for continuations that the model itself draws. [S, T, hidden]."""
    gradients = torch.empty_like(hidden)
    for row, x in enumerate(hidden):
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            read = decoder.finish(x)
        chances = decoder.logits(read.detach()).softmax(1)
        drawn = torch.multinomial(chances.cpu(), 1, generator=random).to(chances.device)
        chances.scatter_add_(1, drawn, torch.full_like(chances[:, :1], -1.0))  # now the gradient of the logits
        (gradients[row],) = torch.autograd.grad(read, x, decoder.logits_backward(chances))
    return gradients


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """What a pass backward meets at one fold. x: its input. gradients: of each linear's output. before: of the input of
    the layer."""

    fold: Fold
    x: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    before: torch.Tensor

    def lengths(self) -> torch.Tensor:
        """Returns how long the gradients are at each token, [S, T]."""
        return torch.stack([gradient.square().sum(2) for gradient in self.gradients.values()]).sum(0).sqrt()

    def loss(self, weights: BlockWeights, rounded: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """Nats a token, where each weight becomes what `rounded` makes of it."""
        total = torch.zeros(self.x.shape[:2], device=self.x.device)
        for name, gradient in self.gradients.items():
            weight = weights[f"{name}.weight"]
            total += (functional.linear(self.x, rounded(weight) - weight) * gradient).sum(2)
        return float(total.square().mean()) / 2


def _backward(decoder: Decoder, index: int, inputs: torch.Tensor, gradients: torch.Tensor) -> list[_Seen]:
    """In the order of the folds. `gradients`: of the layer's output."""
    weights = {name: tensor.clone() for name, tensor in decoder.layer(index).items()}  # grad takes no inference tensor
    reads: dict[str, torch.Tensor] = {}
    made: dict[str, torch.Tensor] = {}

    def observe(linear: str, x: torch.Tensor, output: torch.Tensor) -> None:
        reads[linear], made[linear] = x.detach(), output

    with torch.enable_grad():
        x = inputs.detach().clone().requires_grad_()
        out = decoder.block(index, inputs.shape[1]).forward(weights, x, None, observe)
        before, *found = torch.autograd.grad(out, [x, *made.values()], gradients)
    by_name = dict(zip(made, found, strict=True))
    return [
        _Seen(fold, reads[fold.linears[0]], {name: by_name[name] for name in fold.linears}, before)
        for fold in folds(decoder.config)
    ]


def _part(decoder: Decoder, index: int, seen: _Seen, groups: Sequence[int]) -> LayerPart:
    weights, fold = decoder.layer(index), seen.fold

    def four(group: int) -> float:
        return seen.loss(weights, lambda weight: round_groups(weight, group).dequantize(weight.dtype))

    size = sum(weights[f"{name}.weight"].numel() for name in fold.linears)
    lost = {group: four(group) for group in groups if fold.inputs % group == 0}
    eight = seen.loss(weights, lambda weight: round_rows(weight).dequantize(weight.dtype))
    return LayerPart(index, fold.linears, fold.inputs, size, lost, eight)
