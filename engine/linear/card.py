"""Four- and eight-bit weights on a card, kept once: as the decode kernels read them."""

from __future__ import annotations

import torch

from engine.kernels.weights import Matrix, dequantize

_ROWS_AT_ONCE = 4096  # bounds the plain copy; a multiple of 8


class CardLinear:
    """Products by tiles of dequantized rows: right on every device, and slow. Decoders read `matrix` themselves."""

    def __init__(self, matrix: Matrix, bias: torch.Tensor | None) -> None:
        self.matrix = matrix
        self.bias = bias  # float32 [rows]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.matrix.rows
        y = x.new_empty(x.shape[0], rows)
        for first in range(0, rows, _ROWS_AT_ONCE):
            last = min(first + _ROWS_AT_ONCE, rows)
            y[:, first:last] = x @ dequantize(self.matrix, first, last, x.dtype).T
        return y if self.bias is None else y.add_(self.bias)

    @property
    def nbytes(self) -> int:
        """Bytes a call reads."""
        return self.matrix.nbytes + (0 if self.bias is None else self.bias.nbytes)
