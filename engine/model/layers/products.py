"""Products of a chunk with any linear of a model on a GPU."""

from __future__ import annotations

import torch

from engine.kernels import gated_product, plain_product
from engine.kernels import gemm as many
from engine.kernels import prefill as ops
from engine.kernels.build import Kernels
from engine.kernels.gpu import GpuShape
from engine.kernels.launch import Enqueues, Launch
from engine.kernels.weights import Format, Matrix
from engine.linear import DenseLinear, Linear
from engine.linear.chosen import ChosenProducts
from engine.linear.cuda import CudaLinear
from engine.linear.plain_copies import PlainCopies
from engine.model.weights import Layer


def why_not(linear: Linear) -> str | None:
    if isinstance(linear, DenseLinear):
        return None
    if isinstance(linear, CudaLinear):
        return many.why_not(linear.matrix)
    return f"linears of type {type(linear).__name__}"


class Products:
    """Multiplies into a buffer that all products share."""

    def __init__(
        self,
        library: Kernels,
        launcher: Enqueues,
        gpu: GpuShape,
        overlap: bool,
        plain: PlainCopies,
        chosen: ChosenProducts,
    ) -> None:
        self._library = library
        self._plain = plain
        self._chosen = chosen
        self._launcher = launcher
        self._overlap = overlap  # a product may start before what precedes it has ended
        self._gpu = gpu
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}  # by address; few

    def order(self, linear: Linear, tokens: int) -> Format:
        """The columns' order of what the linear multiplies."""
        linear = self._plain.of(linear, tokens)
        if not isinstance(linear, CudaLinear):
            return Format.BF16
        return many.order(linear.matrix, many.divide(linear.matrix, tokens, self._gpu))

    def bytes_of(self, linear: Linear, tokens: int) -> int:
        linear = self._plain.of(linear, tokens)
        if isinstance(linear, CudaLinear):
            slices = many.divide(linear.matrix, tokens, self._gpu).slices
            return _bytes(slices, tokens, linear.matrix.rows)
        dense = _dense(linear)
        own = self._of_few(dense, tokens, many.MOST_SLICES)
        return _bytes(1 if own is None else own.slices, tokens, dense.weight.shape[0])

    def __call__(
        self, linear: Linear, x: torch.Tensor, room: torch.Tensor, most_slices: int = many.MOST_SLICES
    ) -> ops.ProductParts:
        """x bfloat16 [tokens, columns], in the linear's order, · Wᵀ."""
        linear = self._plain.of(linear, x.shape[0])
        if isinstance(linear, CudaLinear):
            how = many.divide(linear.matrix, x.shape[0], self._gpu, most_slices)
            return self._quantized(linear, x, room, how)
        dense = _dense(linear)
        own = self._of_few(dense, x.shape[0], most_slices)
        if own is not None:
            out = self._results(room, own.slices, x.shape[0], dense.weight.shape[0])
            self._enqueue(plain_product.plain_product(self._library, x, dense.weight, out, own))
            return ops.ProductParts(out)
        out = self._view(room, (x.shape[0], dense.weight.shape[0]), torch.bfloat16)
        if x.is_meta:  # nothing to multiply, and no kernel of ours
            return ops.ProductParts(out)
        if dense.bias is None:
            self._chosen.multiply(dense.weight, x, out)
        else:
            torch.addmm(dense.bias, x, dense.weight.t(), out=out)
        return ops.ProductParts(out)

    def gated(self, linear: Linear, x: torch.Tensor, room: torch.Tensor, inner: torch.Tensor, order: Format) -> None:
        """inner bfloat16 [tokens, half], columns in the order named, = silu(gate) · up of x · Wᵀ, W gates then ups."""
        dense = self._gating(linear, x.shape[0], order)
        if dense is None:
            self._enqueue(ops.gate(self._library, self(linear, x, room), inner, order))
            return
        own = self._of_few(dense, x.shape[0], 1, gated=True)
        if own is None:
            self._enqueue(gated_product.gated_product(self._library, x, dense.weight, inner))
        else:
            self._enqueue(plain_product.plain_product(self._library, x, dense.weight, inner, own, gated=True))

    def layer_bytes(self, layer: Layer, tokens: int) -> int:
        left = [layer.qkv, layer.output, layer.down]
        if self._gating(layer.gate_up, tokens, self.order(layer.down, tokens)) is None:
            left.append(layer.gate_up)
        return max(self.bytes_of(linear, tokens) for linear in left)

    def _gating(self, linear: Linear, tokens: int, order: Format) -> DenseLinear | None:
        """The weight where product and gate are one kernel, which leaves its columns as they come."""
        linear = self._plain.of(linear, tokens)
        if order is not Format.BF16 or not isinstance(linear, DenseLinear) or linear.bias is not None:
            return None
        few = self._of_few(linear, tokens, 1, gated=True) is not None
        return linear if few or gated_product.why_not(linear.weight, tokens, self._gpu) is None else None

    def _of_few(
        self, dense: DenseLinear, tokens: int, most_slices: int, *, gated: bool = False
    ) -> plain_product.Division | None:
        """None where our own kernel does not multiply so few tokens."""
        weight = dense.weight
        if dense.bias is not None or plain_product.why_not(weight, tokens, self._gpu, gated=gated) is not None:
            return None
        return plain_product.divide(tokens, *weight.shape, self._gpu, most_slices, gated=gated)

    def _quantized(
        self, linear: CudaLinear, x: torch.Tensor, room: torch.Tensor, how: many.GemmDivision
    ) -> ops.ProductParts:
        matrix, tokens = linear.matrix, x.shape[0]
        out = self._results(room, how.slices, tokens, matrix.rows)
        if how.slices == 1:
            self._go(matrix, many.Batch(x, out, linear.bias), how)
            return ops.ProductParts(out)
        self._go(matrix, many.Batch(x, out), how)
        return ops.ProductParts(out, linear.bias)

    def _results(self, room: torch.Tensor, slices: int, tokens: int, rows: int) -> torch.Tensor:
        if slices == 1:
            return self._view(room, (tokens, rows), torch.bfloat16)
        return self._view(room, (slices, tokens, rows), torch.float32)

    def _view(self, room: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Made once, since a start asks for each view some hundred times."""
        if room.is_meta:
            return _front(room, shape, dtype)
        key = room.data_ptr(), shape, dtype
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = _front(room, shape, dtype)
        return found

    def _go(self, matrix: Matrix, batch: many.Batch, how: many.GemmDivision) -> None:
        self._enqueue(many.gemm(self._library, matrix, batch, how))

    def _enqueue(self, launch: Launch) -> None:
        self._launcher.enqueue((launch if self._overlap else launch.alone(),))


def _bytes(slices: int, tokens: int, rows: int) -> int:
    return tokens * rows * (2 if slices == 1 else 4 * slices)


def _dense(linear: Linear) -> DenseLinear:
    if not isinstance(linear, DenseLinear):
        raise TypeError(f"no product with {type(linear).__name__}")
    return linear


def _front(room: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return room[: count * dtype.itemsize].view(dtype).view(shape)
