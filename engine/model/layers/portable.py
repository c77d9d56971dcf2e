"""The walk of decoding rows for every family, format and 16-bit dtype: torch's products, and between them kernels that
know every feature. What it computes is compared with `eager`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kernels import batch_attention, gemm, prefill
from engine.kernels import portable as ops
from engine.kernels.attention import Heads, LayerAttention
from engine.kernels.batch_attention import BatchAttention, BatchRows
from engine.kernels.build import Kernels
from engine.kernels.launch import Enqueues, Launch, launcher_of
from engine.kernels.portable import HeadPlaces, LayerKind, NormedStream
from engine.kernels.rows import RowStates
from engine.linear import DenseLinear, Linear
from engine.linear.cuda import CudaLinear
from engine.model import features
from engine.model.features import Feature
from engine.model.layers.many_tokens import Loaded
from engine.model.norm import NoNorm, RmsNorm, WideNorm

COMPUTED = frozenset(Feature)


def why_not(parts: Loaded) -> str | None:
    return features.why_not(parts.model.config, COMPUTED) or _kind(parts).why_not()


def why_slow_attention(parts: Loaded) -> str | None:
    """Returns why long contexts are read by the plain kernel, if they are."""
    return batch_attention.why_not(_kind(parts).heads)


def _kind(parts: Loaded) -> LayerKind:
    model = parts.model
    config, norm = model.config, model.weights.layers[0].head_norm
    return LayerKind(
        columns=config.hidden_size,
        heads=Heads(config.heads, config.kv_heads, config.head_dim, config.qk_norm),
        inner=config.intermediate_size,
        norm=ops.NO_NORM if norm is None else ops.OF_ALL if isinstance(norm, WideNorm) else ops.OF_HEADS,
        gelu=config.activation == "gelu",
        dtype=model.placement.dtype,
        kept=parts.pool.stored.itemsize,
    )


class PortableRows:
    """A `RowWalk` of at most the last of `sizes` rows."""

    def __init__(self, parts: Loaded, sizes: Sequence[int]) -> None:
        self._parts, self._model, self._kind = parts, parts.model, _kind(parts)
        self.library: Kernels = parts.kernels
        device, config, kind = parts.model.placement.device, parts.model.config, self._kind
        self.launcher: Enqueues = launcher_of(device)
        windowed = self._model.ropes.windowed
        self._angles = [
            self._model.ropes.full if window is None or windowed is None else windowed for window in config.windows
        ]
        self._pools = [self._pool(index) for index in range(config.layers)]
        self._attention = _Attention(self.library, kind, config.windows, sizes[-1], device)

        def rows(*width: int, dtype: torch.dtype = kind.dtype) -> torch.Tensor:
            return torch.zeros(sizes[-1], *width, dtype=dtype, device=device)

        self._x = rows(kind.columns)
        self._queries = rows(kind.heads.queries, kind.heads.dim)
        self._attended = rows(kind.heads.queries * kind.heads.dim)
        self._inner = rows(kind.inner)
        self._logits = rows(config.vocab_size, dtype=torch.float32)

    def _pool(self, index: int) -> LayerAttention:
        keys, values = self._parts.pool.layer(index).unbind(0)
        return LayerAttention(keys, values, None, None, self._parts.model.config.windows[index])

    def go(self, launch: Launch) -> None:
        self.launcher.enqueue((launch if self.library.gpu.overlap else launch.alone(),))

    def logits(self, own: RowStates) -> prefill.ProductParts:
        weights, count, eps = self._model.weights, own.token.shape[0], self._model.config.norm_eps
        held = BatchRows(own.length, own.pages)
        for plan in self._attention.plans(held):
            self.go(plan)
        stream = NormedStream(self._model.embedded(own.token), self._x[:count], eps)
        norms = [layer.input_norm for layer in weights.layers] + [weights.norm]
        self._join(stream, norms[0])
        for index, layer in enumerate(weights.layers):
            self._attend(index, layer.qkv, layer.head_norm, stream, own)
            attended = self._attended[:count]
            self._join(stream, layer.mlp_norm, self._multiply(layer.output, attended), layer.output_norm)
            inner = self._inner[:count]
            product = self._multiply(layer.gate_up, stream.x)
            self.go(ops.gate(self.library, self._kind, product, inner))
            self._join(stream, norms[index + 1], self._multiply(layer.down, inner), layer.down_norm)
        return self._head(stream.x)

    def _attend(self, index: int, qkv: Linear, norm: RmsNorm | None, stream: NormedStream, own: RowStates) -> None:
        count, layer = own.token.shape[0], self._pools[index]
        queries, held = self._queries[:count], BatchRows(own.length, own.pages)
        gains = None if norm is None else norm.weight
        places = HeadPlaces(own.position, own.pages, self._angles[index], gains, stream.eps)
        product = self._multiply(qkv, stream.x)
        self.go(ops.heads(self.library, self._kind, layer, places, product, queries))
        self.go(self._attention.attend(held, layer, queries, self._attended[:count]))

    def _join(
        self, stream: NormedStream, norm: RmsNorm, fresh: torch.Tensor | None = None, fresh_norm: RmsNorm | None = None
    ) -> None:
        gain = None if isinstance(norm, NoNorm) else norm.weight
        fresh_gain = None if fresh_norm is None else fresh_norm.weight
        self.go(ops.join(self.library, self._kind, stream, gain, fresh, fresh_gain))

    def _multiply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        linear = self._parts.plain.of(linear, x.shape[0])
        if not x.is_meta:
            return linear(x)
        if isinstance(linear, CudaLinear):  # asks for the kernel that `linear` would take
            how = gemm.divide(linear.matrix, x.shape[0], self.library.gpu)
            gemm.gemm(self.library, linear.matrix, gemm.Batch(x, x, linear.bias), how)
        return x

    def _head(self, x: torch.Tensor) -> prefill.ProductParts:
        room, head = self._logits[: x.shape[0]], self._model.weights.head
        if isinstance(head, DenseLinear):
            if not x.is_meta:
                torch.mm(x, head.weight.t(), out_dtype=torch.float32, out=room)
        else:
            found = self._multiply(head, x)
            if not x.is_meta:
                room.copy_(found)
        return prefill.ProductParts(room.unsqueeze(0))


class _Attention:
    """Attends by the kernel for many rows where that knows the heads, else by the plain one."""

    def __init__(
        self, library: Kernels, kind: LayerKind, windows: Sequence[int | None], rows: int, device: torch.device
    ) -> None:
        self._library, self._kind = library, kind
        self._grid = None
        if batch_attention.why_not(kind.heads) is None:
            self._grid = grid = batch_attention.grid(kind.heads, library.gpu)
            self._spaces = {
                window: batch_attention.workspace(kind.heads, rows, grid, device) for window in dict.fromkeys(windows)
            }

    def plans(self, rows: BatchRows) -> list[Launch]:
        """Returns what must be enqueued before the walk."""
        return [] if self._grid is None else [self._of(rows, window).plan() for window in self._spaces]

    def attend(self, rows: BatchRows, layer: LayerAttention, queries: torch.Tensor, out: torch.Tensor) -> Launch:
        if self._grid is None:
            return ops.attend(self._library, self._kind, layer, rows, queries, out)
        return self._of(rows, layer.window).attend(layer, queries, out)

    def _of(self, rows: BatchRows, window: int | None) -> BatchAttention:
        assert self._grid is not None
        return BatchAttention(self._library, self._kind.heads, rows, self._grid, self._spaces[window], window)
