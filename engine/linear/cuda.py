"""Multiplies by four- and eight-bit weights on a GPU, in one copy: the layout that the decode kernels read."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from engine.kernels.build import BuildError, Kernels, open_library
from engine.kernels.gemm import Batch, divide, gemm, order, ordered
from engine.kernels.gpu import GpuShape, gpu_shape
from engine.kernels.launch import Launcher
from engine.kernels.weights import Matrix, dequantize

_log = logging.getLogger(__name__)
_ROWS_AT_ONCE = 4096  # bounds the plain copy; a multiple of 8


@dataclass(frozen=True, slots=True)
class _Ready:
    library: Kernels
    launcher: Launcher
    device: GpuShape


class CudaKernels:
    def __init__(self) -> None:
        self._ready: _Ready | None = None
        self._tried = False

    def multiply(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor | None:
        """None where the kernel does not serve."""
        if not x.is_cuda or x.dtype != torch.bfloat16:
            return None
        ready = self._open(x.device)
        if ready is None:
            return None
        try:
            how = divide(matrix, x.shape[0], ready.device)
        except ValueError:  # too little shared memory
            return None
        shape = (x.shape[0], matrix.rows) if how.slices == 1 else (how.slices, x.shape[0], matrix.rows)
        out = x.new_empty(shape, dtype=torch.bfloat16 if how.slices == 1 else torch.float32)
        batch = Batch(ordered(x.contiguous(), order(matrix, how)), out, bias)
        ready.launcher.enqueue((gemm(ready.library, matrix, batch, how).alone(),))
        if how.slices == 1:
            return out
        total = out.sum(0)
        return (total if bias is None else total.add_(bias)).bfloat16()

    def _open(self, device: torch.device) -> _Ready | None:
        if not self._tried:
            self._tried = True
            try:
                library = open_library(torch.cuda.get_device_capability(device))
                self._ready = _Ready(library, Launcher(), gpu_shape(device))
            except (BuildError, ImportError) as failure:
                _log.warning("products of quantized weights are slow here: %s", " ".join(str(failure).split())[:300])
        return self._ready


class CudaLinear:
    """Multiplies by the matrix kernel, or slowly by tiles of dequantized rows. Executors read `matrix` themselves."""

    def __init__(self, matrix: Matrix, bias: torch.Tensor | None, kernels: CudaKernels | None = None) -> None:
        self.matrix = matrix
        self.bias = bias  # float32 [rows]
        self._kernels = kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found = None if self._kernels is None else self._kernels.multiply(x, self.matrix, self.bias)
        return self._plain(x) if found is None else found

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.matrix.rows
        y = x.new_empty(x.shape[0], rows)
        for first in range(0, rows, _ROWS_AT_ONCE):
            last = min(first + _ROWS_AT_ONCE, rows)
            y[:, first:last] = x @ dequantize(self.matrix, first, last, x.dtype).T
        return y if self.bias is None else y.add_(self.bias)

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + (0 if self.bias is None else self.bias.nbytes)
