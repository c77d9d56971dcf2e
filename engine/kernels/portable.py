"""Wrappers of the kernels between the products of a step of many rows, for every family: `join`, `heads`, `gate`, and
attention over heads of any size. Activations are bfloat16 or float16. The reference is `engine.model.layers.eager`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.attention import Heads, LayerAttention
from engine.kernels.batch_attention import LOG2_E, BatchRows
from engine.kernels.build import Kernel, Kernels
from engine.kernels.launch import Argument, Launch, Shape, prepare
from engine.kernels.linear import CHAIN

DTYPES = (torch.bfloat16, torch.float16)
_JOIN_THREADS, _THREADS = 512, 256
NO_NORM, OF_HEADS, OF_ALL = range(3)  # of queries and keys


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What the kernels are compiled for. One kind serves all layers of a model."""

    columns: int
    heads: Heads
    inner: int
    norm: int  # NO_NORM, OF_HEADS or OF_ALL
    gelu: bool
    dtype: torch.dtype
    kept: int  # bytes of a number in a page

    def why_not(self) -> str | None:
        if self.dtype not in DTYPES:
            return f"activations are {self.dtype}, the portable kernels read bfloat16 and float16"
        if self.heads.dim % 8 or self.heads.dim > 256:
            return f"heads of {self.heads.dim}, the portable kernels know multiples of 8 up to 256"
        if self.columns % 2 or self.inner % 2:
            return f"a hidden size of {self.columns} or an inner one of {self.inner} is odd"
        return None

    def kernel(self, library: Kernels, entry: str) -> Kernel:
        defines = {
            "OP_COLUMNS": self.columns,
            "OP_Q_HEADS": self.heads.queries,
            "OP_KV_HEADS": self.heads.keys,
            "OP_HEAD_DIM": self.heads.dim,
            "OP_INNER": self.inner,
            "OP_NORM": self.norm,
            "OP_GELU": int(self.gelu),
            "OP_F16": int(self.dtype == torch.float16),
            "OP_KV_BYTES": self.kept,
        }
        return library.kernel("portable", entry, defines)


@dataclass(frozen=True, slots=True)
class NormedStream:
    residual: torch.Tensor  # float32 [rows, columns]
    x: torch.Tensor  # [rows, columns]: what the next product reads
    eps: float


def join(
    library: Kernels,
    kind: LayerKind,
    stream: NormedStream,
    gain: torch.Tensor | None,
    fresh: torch.Tensor | None = None,
    fresh_gain: torch.Tensor | None = None,
) -> Launch:
    """residual += fresh [rows, columns], normed if there is a gain for it; x = the normed residual, or the residual
    itself without `gain`. Gains float32 [columns]."""
    values: dict[str, Argument] = {
        "fresh": fresh,
        "fresh_gain": fresh_gain,
        "gain": gain,
        "stream": stream.residual,
        "x": stream.x,
        "eps": stream.eps,
    }
    shape = Shape((stream.x.shape[0], 1, 1), _JOIN_THREADS)
    return prepare(kind.kernel(library, "join"), shape, {**values, **CHAIN})


@dataclass(frozen=True, slots=True)
class HeadPlaces:
    position: torch.Tensor  # int32 [rows]; -1 is an idle row, which writes nothing
    pages: torch.Tensor  # int32 [rows, most pages of a row]
    angles: torch.Tensor  # float32 [positions, 2, dim]
    gains: torch.Tensor | None  # float32 [queries + keys, dim]
    eps: float


def heads(
    library: Kernels,
    kind: LayerKind,
    layer: LayerAttention,
    places: HeadPlaces,
    qkv: torch.Tensor,
    queries: torch.Tensor,
) -> Launch:
    """qkv [rows, all heads · dim] → queries [rows, heads, dim], normed and rotated, and keys and values in their
    pages."""
    values: dict[str, Argument] = {
        "qkv": qkv,
        "gains": places.gains,
        "angles": places.angles,
        "positions": places.position,
        "page_table": places.pages,
        "table_stride": places.pages.stride(0),
        "queries": queries,
        "key_pool": layer.keys,
        "value_pool": layer.values,
        "eps": places.eps,
    }
    warps = _THREADS // 32
    count = kind.heads.queries + 2 * kind.heads.keys
    shape = Shape((-(-count // warps), qkv.shape[0], 1), _THREADS)
    return prepare(kind.kernel(library, "heads"), shape, {**values, **CHAIN})


def attend(
    library: Kernels,
    kind: LayerKind,
    layer: LayerAttention,
    rows: BatchRows,
    queries: torch.Tensor,
    out: torch.Tensor,
) -> Launch:
    """queries [rows, heads, dim] → out [rows, heads · dim]."""
    values: dict[str, Argument] = {
        "queries": queries,
        "key_pool": layer.keys,
        "value_pool": layer.values,
        "page_table": rows.pages,
        "table_stride": rows.pages.stride(0),
        "lengths": rows.lengths,
        "out": out,
        "scale": kind.heads.dim**-0.5 * LOG2_E,
        "window": layer.window or 0,
    }
    shape = Shape((kind.heads.queries, queries.shape[0], 1), _THREADS)
    return prepare(kind.kernel(library, "attend"), shape, {**values, **CHAIN})


def gate(library: Kernels, kind: LayerKind, product: torch.Tensor, out: torch.Tensor) -> Launch:
    """out [rows, inner] = activation(gate) · up, of product [rows, 2 · inner] with gates first."""
    shape = Shape((-(-kind.inner // (2 * _THREADS)), out.shape[0], 1), _THREADS)
    return prepare(kind.kernel(library, "gate"), shape, {"product": product, "out": out, **CHAIN})
