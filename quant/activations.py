"""Statistics of a linear's inputs from calibration: the magnitude of each channel, and products of nearby channels."""

from __future__ import annotations

import math
from typing import Final

import torch

from quant.errors import CannotQuantize

_WIDTH: Final = 2048  # channels whose products are kept together; bounds memory to inputs * _WIDTH floats
_DAMPING: Final = 0.1  # of the mean square of the inputs: keeps rare ones from moving weights far


class Activations:
    """Running sums over tokens. Linears that read the same input share one of these."""

    def __init__(self, inputs: int, group: int, device: torch.device) -> None:
        self.group = group
        self._tokens = 0
        self._magnitude = torch.zeros(inputs, device=device)
        width = max(group, _WIDTH // group * group)
        self.blocks = tuple(slice(first, min(first + width, inputs)) for first in range(0, inputs, width))
        self._products = [torch.zeros(size, size, device=device) for size in map(_length, self.blocks)]

    def add(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """x: float32 [..., K]. weights: how much each token counts, [...], about 1 in the mean; None: all the same."""
        flat = x.reshape(-1, x.shape[-1])
        self._tokens += flat.shape[0]
        if weights is not None:
            flat = flat * weights.reshape(-1, 1).sqrt()
        self._magnitude += flat.abs().sum(0)
        for block, products in zip(self.blocks, self._products, strict=True):
            products.addmm_(flat[:, block].T, flat[:, block])

    def magnitude(self) -> torch.Tensor:
        """Mean absolute value, [K]."""
        return self._magnitude / max(self._tokens, 1)

    def products(self, block: int) -> torch.Tensor:
        """Mean of x xᵀ over one of `blocks`."""
        return self._products[block] / max(self._tokens, 1)

    def damped(self, block: int) -> torch.Tensor:
        """Returns the same in double precision with a little of the mean square on its diagonal, so that it has an
        inverse."""
        products = self.products(block).double()
        mean = float(products.diagonal().mean())
        if not math.isfinite(mean):
            raise CannotQuantize("the calibration text drives a layer's inputs beyond float32: give another text")
        products.diagonal().add_(_DAMPING * mean if mean > 0 else 1.0)
        return products

    def group_products(self) -> torch.Tensor:
        """Mean of x xᵀ within each group, [K/g, g, g]."""
        parts = []
        for products in self._products:
            count = products.shape[0] // self.group
            square = products.view(count, self.group, count, self.group)
            parts.append(square.diagonal(dim1=0, dim2=2).permute(2, 0, 1))
        return torch.cat(parts) / max(self._tokens, 1)

    def divide(self, columns: torch.Tensor) -> None:
        """Follows a scale [K] that was folded into the operation before."""
        self._magnitude /= columns
        for block, products in zip(self.blocks, self._products, strict=True):
            products /= columns[block].unsqueeze(0) * columns[block].unsqueeze(1)


def _length(block: slice) -> int:
    return int(block.stop) - int(block.start)
