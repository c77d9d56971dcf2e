"""What the ranks of a split model exchange in a walk over its layers.

Partial sums are added up in the type of activations, which is float32 on a CPU. The first rank alone needs logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch.nn import functional

from engine.linear import Linear
from engine.model.norm import RmsNorm, WideNorm
from engine.model.split import Part
from engine.model.weights import Layer


class RankExchange(Protocol):
    """Exchanges tensors between the ranks. All ranks call the same methods in the same order, with tensors of the same
    shapes."""

    @property
    def part(self) -> Part: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Adds up the tensors of all ranks, in place; each rank gets the same bits."""

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Gives all ranks the first one's numbers, in place."""

    def collect(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Returns the tensors of all ranks, by rank, on the first; None on the others."""


class SummedLinear:
    """A linear of which each rank has some of the inputs."""

    def __init__(self, own: Linear, exchange: RankExchange) -> None:
        self._own = own
        self._exchange = exchange

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange.sum(self._own(x).contiguous())

    @property
    def nbytes(self) -> int:
        return self._own.nbytes


class SplitWideNorm(WideNorm):
    """Normalises the heads of all ranks as one; weight [heads + kv_heads, dim] of this rank's."""

    def __init__(self, own: WideNorm, exchange: RankExchange) -> None:
        super().__init__(own.weight, own.eps, own.heads)
        self._exchange = exchange

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x float32 [tokens, heads + kv_heads, dim]; the result is new."""
        halves = x[:, : self.heads], x[:, self.heads :]
        squares = torch.stack([half.square().sum(dim=(1, 2)) for half in halves])
        # A head that several ranks hold counts as often in the sum as in the size.
        sizes = [self._exchange.part.ranks * half.shape[1] * half.shape[2] for half in halves]
        means = self._exchange.sum(squares) / squares.new_tensor(sizes).unsqueeze(1)
        scales = torch.rsqrt(means + self.eps).view(2, -1, 1, 1).unbind(0)
        return torch.cat([half * scale for half, scale in zip(halves, scales, strict=True)], 1).mul_(self.weight)


def summed(layer: Layer, exchange: RankExchange) -> Layer:
    """Returns the layer with sums over all ranks."""
    norm: RmsNorm | None = layer.head_norm
    if isinstance(norm, WideNorm):
        norm = SplitWideNorm(norm, exchange)
    output, down = (SummedLinear(one, exchange) for one in (layer.output, layer.down))
    return replace(layer, output=output, down=down, head_norm=norm)


def embedded(ids: torch.Tensor, embedding: torch.Tensor, vocab_size: int, exchange: RankExchange) -> torch.Tensor:
    """Returns the embeddings of any tokens, float32 [tokens, hidden]. `embedding` holds this rank's tokens alone."""
    own = exchange.part.vocabulary(vocab_size)
    theirs = (ids < own.first) | (ids >= own.last)
    found = functional.embedding((ids - own.first).masked_fill(theirs, 0), embedding).float()
    return exchange.sum(found.masked_fill_(theirs.unsqueeze(1), 0.0))


def whole_logits(own: torch.Tensor, vocab_size: int, exchange: RankExchange) -> torch.Tensor | None:
    """Returns logits over the whole vocabulary on the first rank, from those [rows, tokens] of each rank."""
    spans = [Part(rank, exchange.part.ranks).vocabulary(vocab_size) for rank in range(exchange.part.ranks)]
    padded = functional.pad(own, (0, spans[0].size - own.shape[1]))
    found = exchange.collect(padded.contiguous())
    if found is None:
        return None
    return torch.cat([one[:, : span.size] for one, span in zip(found, spans, strict=True)], 1)


def whole_heads(own: torch.Tensor, axis: int, kv_heads: int, exchange: RankExchange) -> torch.Tensor | None:
    """Returns keys and values of all heads on the first rank, from bytes with each rank's heads in `axis`."""
    found = exchange.collect(own.contiguous())
    if found is None:
        return None
    step = max(1, exchange.part.ranks // kv_heads)  # ranks that hold the same head
    return torch.cat(found[::step], axis)
