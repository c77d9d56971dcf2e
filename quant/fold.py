"""Lists where an input scale can go: multiplied into a linear's columns, divided out of the operation before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quant.block import BlockWeights
from quant.checkpoint.config import ModelConfig
from quant.checkpoint.tensors import layer_form


@dataclass(frozen=True, slots=True)
class Fold:
    """`linears` read one input, made by `before` (a norm or a linear; None where nothing can take a scale in).

    Under grouped queries each channel of v_proj feeds `share` heads of o_proj's input: they take one scale.
    """

    linears: tuple[str, ...]
    before: str | None
    inputs: int
    share: int = 1
    head_dim: int = 1

    @property
    def channels(self) -> int:
        return self.inputs // self.share

    def to_inputs(self, scale: torch.Tensor) -> torch.Tensor:
        """[channels] of `before` -> [inputs] of the linears."""
        heads = scale.view(-1, 1, self.head_dim)
        return heads.expand(heads.shape[0], self.share, self.head_dim).reshape(-1)

    def to_channels(self, inputs: torch.Tensor) -> torch.Tensor:
        """[inputs] of the linears -> their mean over the heads that share, [channels]."""
        return inputs.view(-1, self.share, self.head_dim).mean(1).reshape(-1)


def folds(config: ModelConfig) -> tuple[Fold, ...]:
    """In the order of the forward pass."""
    form = layer_form(config)
    shared = {form.output: (config.heads // config.kv_heads, config.head_dim)}
    return tuple(Fold(one.linears, one.follows, one.inputs, *shared.get(one, ())) for one in form.products)


def fold_in(weights: BlockWeights, fold: Fold, scale: torch.Tensor) -> None:
    """Replaces the weights of one layer; its output stays the same, but for rounding. scale: [channels], positive."""
    columns = fold.to_inputs(scale)
    for linear in fold.linears:
        weights[f"{linear}.weight"] = weights[f"{linear}.weight"] * columns
    before = weights[f"{fold.before}.weight"]
    weights[f"{fold.before}.weight"] = before / (scale if before.dim() == 1 else scale.unsqueeze(1))
    bias = weights.get(f"{fold.before}.bias")
    if bias is not None:
        weights[f"{fold.before}.bias"] = bias / scale
