"""Four- and eight-bit weights on a CPU: torch's packed kernels for few rows, tiles of plain weights for many.

The packed kernels take and give bfloat16. Both ways round activations and results to it, so that how many rows a step
has does not show in them.
"""

from __future__ import annotations

import torch

from engine.linear.cpu_layouts import CpuInt4, CpuInt8, DensePlan


class CpuLinear:
    """A packed weight. `dense_rows`: from how many rows on tiles are quicker."""

    def __init__(
        self, packed: CpuInt4 | CpuInt8, bias: torch.Tensor | None, dense_rows: int, dense_dtype: torch.dtype
    ) -> None:
        self.packed = packed
        self.bias = bias  # float32 [rows]
        self._dense_rows = dense_rows
        self._dense_dtype = dense_dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rounded = x.to(torch.bfloat16)
        if x.shape[0] < self._dense_rows:
            y = self.packed.matmul(rounded)
        else:
            y = self.packed.matmul_dense(rounded.to(self._dense_dtype)).to(torch.bfloat16)
        y = y.to(x.dtype)
        return y if self.bias is None else y.add_(self.bias)

    @property
    def nbytes(self) -> int:
        """Bytes a call reads."""
        return self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)


class Int4Cpu(CpuLinear):
    """Four bits."""

    def __init__(self, packed: CpuInt4, bias: torch.Tensor | None, plan: DensePlan) -> None:
        super().__init__(packed, bias, plan.int4_rows, plan.dtype)


class Int8Cpu(CpuLinear):
    """Eight bits."""

    def __init__(self, packed: CpuInt8, bias: torch.Tensor | None, plan: DensePlan) -> None:
        super().__init__(packed, bias, plan.int8_rows, plan.dtype)
